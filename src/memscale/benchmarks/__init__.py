"""Measurements that anyone can repeat: `python -m memscale.benchmarks.<name>`."""
