"""What simgpu is measured by: `python -m simgpu.benchmarks published | speed | opinfo`."""
