"""What computes a model's layers, one file per implementation, chosen by name."""

from __future__ import annotations

from engine.kernels.base import Kernels
from engine.kernels.torch_kernels import TorchKernels

__all__ = ["Kernels", "TorchKernels"]
