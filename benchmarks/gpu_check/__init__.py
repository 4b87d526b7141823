"""Runs all checks that need a GPU and prints one table: `benchmarks/gpu_check.sh`."""
