"""Architectures that nobody here chose, trained under MemScale and plain, bit for bit: `python -m benchmarks.zoo`."""
