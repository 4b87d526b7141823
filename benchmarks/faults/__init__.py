"""Measures the effect of faults on a client: `python -m benchmarks.faults` (docs/faults.md)."""
