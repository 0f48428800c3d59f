"""Where MemScale meets a training framework. Each module is loaded only when its framework is in use."""
