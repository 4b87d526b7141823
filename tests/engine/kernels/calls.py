"""Calls single functions of the compiled kernel library."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from hypothesis import strategies as st

from moonserve.engine.kernels.native_library import FLAGS, Call, LayersLibrary
from moonserve.engine.kv_cache.tensors import TORCH_DTYPES
from moonserve.protocol.process.machine import cache_folder

DTYPES = st.sampled_from(list(TORCH_DTYPES.values()))


@dataclass(frozen=True)
class Functions:
    quantise: Call
    product: Call
    gate: Call


@cache
def compiled_library(dtype: torch.dtype, processor: str = "native") -> LayersLibrary:
    """Compiles the library for this processor, or for an older kind whose code this processor can run."""
    [name] = [name for name, known in TORCH_DTYPES.items() if known == dtype]
    flags = [flag.replace("-march=native", f"-march={processor}") for flag in FLAGS]
    return LayersLibrary(name, kernels_folder(), flags=flags)


@cache
def library(dtype: torch.dtype, processor: str = "native") -> Functions:
    compiled = compiled_library(dtype, processor)
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    return Functions(
        quantise=compiled.function("quantise", pointer, pointer, count, count),
        product=compiled.function("product", pointer, pointer, count, count, pointer, count),
        gate=compiled.function("gate", pointer, pointer, count, count, pointer),
    )


def kernels_folder() -> Path:
    """Returns the user's own cache folder, so that many test processes compile only once."""
    return cache_folder(os.environ, Path.home())


def random_tensor(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets the number of torch's threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
