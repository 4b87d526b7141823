"""One model replica: weights, forward pass, paged KV, prefix cache, attention, sampling.

The only package that imports torch. Importing the package itself does not import it, nor do `engine.config`,
`engine.batch` and `engine.block_pool`, so that a process can check its configuration before it pays for the import.
Knows nothing about processes, networks or scheduling.
"""
