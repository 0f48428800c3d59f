"""What lies below: PyTorch's private API, overridden methods, live bytes, random states. Knows no technique."""
