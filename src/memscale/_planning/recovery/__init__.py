"""A step that ran out of memory, done again under a tighter plan, and what may not be repeated."""
