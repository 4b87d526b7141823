"""Input of every check: the device, the sizes to use, and the device's measured limits; and how calls are timed.

Times are medians of rounds measured with the device's own events. Without a GPU (a rehearsal), one call is timed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

ROUNDS = 7
_ROUND_S = 0.02
"""Least duration of a round: short calls are repeated within it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes of all measurements."""

    copy_bytes: int
    matrix_size: int
    decode: tuple[tuple[int, int], ...]  # (sequences, tokens of context), for attention alone
    prefill: tuple[tuple[int, int], ...]  # (tokens, cached tokens before them), for attention alone
    models: tuple[str, ...]  # keys of benchmarks.gpu_check.random_models.SHAPES
    model_decode: tuple[tuple[int, int], ...]
    model_prefill: int  # tokens per prompt
    generated: int  # generated tokens per prompt in comparisons of tokens


FULL = Scale(
    copy_bytes=2**30,
    matrix_size=8192,
    decode=((1, 2048), (8, 2048), (64, 2048), (1, 32768), (64, 8192)),
    prefill=((2048, 0), (8192, 0), (512, 8192)),
    models=("1B", "8B"),
    model_decode=((1, 512), (8, 512), (32, 2048)),
    model_prefill=2048,
    generated=24,
)
REHEARSAL = Scale(
    copy_bytes=2**16,
    matrix_size=64,
    decode=((2, 40),),
    prefill=((20, 0), (10, 30)),
    models=("tiny",),
    model_decode=((2, 20),),
    model_prefill=24,
    generated=3,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Rates that this machine reaches in simple operations."""

    copy_bytes_per_s: float  # on the device; bytes read plus bytes written
    flops_per_s: float  # of a bfloat16 matrix product of random numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    device: torch.device
    scale: Scale
    ceilings: Ceilings

    @property
    def rehearses(self) -> bool:
        return self.scale == REHEARSAL

    def seconds(self, call: Callable[[], object]) -> float:
        return seconds(self.device, call)


def seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Returns the median seconds of a call after two warm-up calls; without a GPU, the seconds of the second call."""
    call()
    once = _round(device, call, 1)
    repeats = max(1, min(1000, int(_ROUND_S / max(once, 1e-6))))
    if device.type != "cuda":
        return once
    return median(_round(device, call, repeats) for _ in range(ROUNDS))


def _round(device: torch.device, call: Callable[[], object], repeats: int) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - began) / repeats
    make_event: Any = torch.cuda.Event
    begin, end = (make_event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / repeats


def measure_ceilings(device: torch.device, scale: Scale) -> Ceilings:
    source = torch.ones(scale.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = seconds(device, lambda: target.copy_(source))
    size = scale.matrix_size
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product = seconds(device, lambda: left @ right)
    return Ceilings(copy_bytes_per_s=2 * scale.copy_bytes / copying, flops_per_s=2 * size**3 / product)
