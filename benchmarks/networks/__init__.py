"""Hosts as network namespaces of one machine, with links that can be made slow or lossy, or cut.

`python -m benchmarks.networks` measures the figures of docs/networks.md on them.
"""
