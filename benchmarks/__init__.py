"""Benchmarks: one script per claim. Each prints a table and writes JSON. Claims are ratios measured in one run."""
