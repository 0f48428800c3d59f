"""Parameter streaming: homes on the host, visits to the device, and what follows from it."""
