"""What faults cost a client: `python -m benchmarks.faults` (docs/faults.md)."""
