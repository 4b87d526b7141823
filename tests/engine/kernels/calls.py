"""Single functions of the compiled library, and what is near enough."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from hypothesis import strategies as st

from engine.kernels.library import FLAGS, Call, Library
from engine.kv_pool import TORCH_DTYPES
from protocol.machine import cache_folder

DTYPES = st.sampled_from(list(TORCH_DTYPES.values()))
_EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Functions:
    normalize: Call
    rotate: Call
    quantise: Call
    product: Call
    gate: Call


@cache
def compiled_library(dtype: torch.dtype, processor: str = "native") -> Library:
    """For this processor, or for an older kind that it can stand in for."""
    [name] = [name for name, known in TORCH_DTYPES.items() if known == dtype]
    flags = [flag.replace("-march=native", f"-march={processor}") for flag in FLAGS]
    return Library(name, kernels_folder(), flags=flags)


@cache
def library(dtype: torch.dtype, processor: str = "native") -> Functions:
    compiled = compiled_library(dtype, processor)
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    return Functions(
        normalize=compiled.function("normalize", pointer, pointer, pointer, count, number),
        rotate=compiled.function("rotate", pointer, pointer, pointer, count),
        quantise=compiled.function("quantise", pointer, pointer, count, count),
        product=compiled.function("product", pointer, pointer, count, count, pointer, count),
        gate=compiled.function("gate", pointer, pointer, count, count, pointer),
    )


def kernels_folder() -> Path:
    """The user's own, so that many test processes compile once."""
    return cache_folder(os.environ, Path.home())


def random_tensor(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor, *, unit: float) -> None:
    """Within `unit` roundings of the dtype, of each value or of the largest one's thousandth."""
    epsilon = _EPSILON[expected.dtype] * unit
    assert found.dtype == expected.dtype
    torch.testing.assert_close(
        found.float(),
        expected.float(),
        rtol=epsilon,
        atol=epsilon * max(1e-3 * float(expected.float().abs().max()), 1e-6)
        if expected.dtype == torch.bfloat16
        else epsilon * float(expected.abs().max()),
    )
