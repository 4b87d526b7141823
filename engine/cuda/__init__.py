"""Support for NVIDIA GPUs. Triton is imported only if it is used; see `requirements`."""
