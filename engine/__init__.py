"""One replica of a model: weights, forward pass, paged KV, prefix cache, attention, sampling.

The only package that imports torch, and importing the package itself does not: `engine.config`, `engine.batch`
and `engine.block_pool` stay free of it, so that a process can check its configuration before it pays
for the import. Knows nothing about processes, networks or scheduling.
"""
