"""NVIDIA GPUs: choice of the device, Triton attention and layers, CUDA graphs, copies of KV between GPU and host. Only
*_kernels.py import Triton, and only when they are used; device.py and staging.py import no torch."""
