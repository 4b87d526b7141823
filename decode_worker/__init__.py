"""The decode phase: receives prompts' KV cache, runs continuous batching and streams tokens.

A request passes through: reserve → receive → commit → batch → stream. `state` decides without I/O; `service` does the
I/O. The package does not know the conductor, HTTP or text, and imports no torch: only the engine handles tensors.
"""
