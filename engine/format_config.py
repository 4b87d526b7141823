"""How a worker holds weights and KV, and what computes on them: options of all that start one. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.config import option
from protocol.layout import KV_DTYPES


@dataclass(frozen=True, kw_only=True)
class FormatConfig:
    """Flags that vLLM has too mean the same."""

    dtype: str = option(
        "auto",
        help="of weights and, unless it is quantised, of KV",
        choices=("auto", "float32", "bfloat16"),
    )
    kv_cache_dtype: str = option(
        "auto",
        help="of KV: auto = as --dtype; fp8 (E4M3) and int8 quantise it, a scale per token and head, with some loss "
        "(docs/kv-dtypes.md)",
        choices=("auto", *KV_DTYPES),
    )
    load_format: str = option(
        "auto", help="dummy = random weights, for measuring", choices=("auto", "dummy")
    )
    block_size: int = option(32, help="tokens per KV block")
    kernels: str = option(
        "auto",
        help="what computes layers and attention: auto = native, compiled at the first start, or torch where there is "
        "no compiler; on a GPU Triton's",
        choices=("auto", "native", "torch"),
    )
