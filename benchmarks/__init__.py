"""Timings of attention on the GPU that is there; run `python -m benchmarks.run --help`."""
