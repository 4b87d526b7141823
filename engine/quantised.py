"""K and V in a byte per element, with a scale per token and head: int8, or fp8 in E4M3.

A head's row is its codes and behind them the scale (`protocol.layout`). Its rule: a row depends on that head of that
token alone, so that a block's bytes are the same whoever wrote its tokens, in whatever order. The native kernels
(`engine/native/quantise.h`) give the same bits: the scale is the highest magnitude over the highest code, codes are
rounded to nearest, ties to even. Why so and not a scale per block: docs/kv-dtypes.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from protocol.layout import SCALE_BYTES

# Below, a head is as good as zero, and its scale must be no denormal.
_LEAST = 1e-30


@dataclass(frozen=True, slots=True)
class Code:
    """How a byte stands for a number between -`highest` and `highest`."""

    highest: float
    dtype: torch.dtype
    round: Callable[[torch.Tensor], torch.Tensor]


CODES = {
    "int8": Code(127.0, torch.int8, torch.round),
    "fp8": Code(448.0, torch.float8_e4m3fn, torch.positive),  # the conversion rounds
}


def quantise(heads: torch.Tensor, code: Code) -> torch.Tensor:
    """[..., head_dim] of any float dtype → rows [..., head_dim + 4] uint8."""
    wide = heads.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp_min(_LEAST) / code.highest
    codes = code.round(wide / scales).to(code.dtype)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], -1)


def dequantise(rows: torch.Tensor, code: Code, dtype: torch.dtype) -> torch.Tensor:
    """rows [..., head_dim + 4] uint8, contiguous → [..., head_dim] in `dtype`."""
    codes = rows[..., :-SCALE_BYTES].view(code.dtype).float()
    return codes.mul_(rows[..., -SCALE_BYTES:].view(torch.float32)).to(dtype)
