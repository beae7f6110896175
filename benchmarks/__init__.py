"""Measures the package on a network with a fast and a slow tier; see `benchmarks/README.md`."""
