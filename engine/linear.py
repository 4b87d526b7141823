"""Matrix products with constant weights, in the layout that the CPU's library likes best.

At a handful of rows a product is bound by reading its weights; oneDNN reads weights that were reordered once two to
three times as fast as row-major ones. Where oneDNN is absent the plain operation does the same. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x [rows, in] → x · weightᵀ + bias [rows, out]."""

# Rows that the reordering is tuned for. Measured: 8 is as good as any from 1 to 512 in bfloat16, and in float32 twice
# as good as 1.
_TYPICAL_ROWS = 8


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The fastest `Linear` for this weight [out, in]. It may keep a reordered copy instead of the weight itself."""
    if weight.device.type == "cpu" and len(weight) and can_pack(weight.dtype):
        return _packed(weight, bias)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    return plain


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch and this CPU have reordered products in `dtype`."""
    operations = torch.ops.mkldnn
    if not torch._C._has_mkldnn or not hasattr(operations, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(operations._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    product = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = product(x, packed, bias, "none", [], "")
        return result

    return linear
