"""The decode phase: landing of prompts' KV, continuous batching, token streams.

Reserve → receive → commit → batch → stream. `state` decides, purely; `service` does the I/O. Does not know the
conductor, HTTP or text, and imports no torch: the engine is its only way to a tensor.
"""
