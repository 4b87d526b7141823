"""Hosts as network namespaces of one machine, with links between them that are slow, lossy and cut at will.

`python -m benchmarks.networks` measures on them what docs/networks.md shows.
"""
