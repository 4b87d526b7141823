"""Decode attention in C (`decode.c`): K and V are read where they lie, nothing is gathered or padded.

Prompt chunks are torch's, as in the reference. Only calls the library; `protocol.native` makes it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.attention.base import Geometry, Span
from engine.attention.chunks import (
    Chunk,
    ChunkAttention,
    first_block,
    plan_chunks,
    singles_first,
)
from engine.kv_pool import KvPool
from protocol.native import CompilerError, load_library

_SOURCE = Path(__file__).with_name("decode.c")
# Sums may be reordered and there are no infinities: what vectorised code needs. Not -ffast-math, which would make every
# thread of the process flush denormals when the library is loaded.
_FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-freciprocal-math",
    "-ffinite-math-only",
    "-fopenmp",
)
# Limits of the kernel's stack buffers.
_MAX_HEADS = 128
_MAX_HEAD_DIM = 256
_MAX_BLOCK_SIZE = 512


class _Shape(ctypes.Structure):
    """`Shape` of decode.c."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("max_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("query_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    rows: int  # single tokens come first
    max_blocks: int
    blocks: torch.Tensor  # [rows, max_blocks] int64
    ranges: torch.Tensor  # [rows, 2] int64: tokens seen, numbered from the row's first block
    chunks: list[Chunk]


class NativePagedAttention:
    """`Attention` for CPUs. Raises CompilerError when it cannot be had for this model or on this machine."""

    name = "native"

    def __init__(self, geometry: Geometry, pool: KvPool, cache_folder: Path | None) -> None:
        self._geometry = geometry
        self._pool = pool
        self._block_size = pool.layout.block_size
        self._chunks = ChunkAttention(geometry, pool)
        self._threads = torch.get_num_threads()
        _check_limits(geometry, self._block_size)
        kernels = cache_folder / "kernels" if cache_folder is not None else None
        library = load_library(_SOURCE, _FLAGS, kernels)
        self._kernel = library[f"decode_{pool.layout.dtype}"]
        self._kernel.argtypes = [ctypes.c_void_p] * 7
        self._kernel.restype = None

    def order(self, lengths: Sequence[tuple[int, int]]) -> list[int]:
        return singles_first(lengths)

    def plan(self, spans: Sequence[Span], window: int | None) -> _Plan:
        singles = [span for span in spans if span.end - span.start == 1]
        begins = [first_block(span, window, self._block_size) for span in singles]
        tables = [span.blocks[begin:] for span, begin in zip(singles, begins, strict=True)]
        max_blocks = max((len(table) for table in tables), default=0)
        blocks = np.zeros((len(singles), max_blocks), dtype=np.int64)
        ranges = np.empty((len(singles), 2), dtype=np.int64)
        for row, (span, begin, table) in enumerate(zip(singles, begins, tables, strict=True)):
            blocks[row, : len(table)] = table
            oldest = 0 if window is None else max(0, span.end - window)
            offset = begin * self._block_size
            ranges[row] = (oldest - offset, span.end - offset)
        return _Plan(
            len(singles),
            max_blocks,
            torch.from_numpy(blocks),
            torch.from_numpy(ranges),
            plan_chunks(self._chunks, spans, window),
        )

    def attend(
        self,
        layer: int,
        plan: _Plan,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        parts = [self._decode(layer, plan, queries)] if plan.rows else []
        parts += [self._chunks.attend(layer, chunk, queries, keys, values) for chunk in plan.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, layer: int, plan: _Plan, queries: torch.Tensor) -> torch.Tensor:
        geometry = self._geometry
        if queries.stride()[1:] != (geometry.head_dim, 1):
            queries = queries.contiguous()
        output = queries.new_empty(plan.rows, geometry.num_heads * geometry.head_dim)
        shape = _Shape(
            plan.rows,
            plan.max_blocks,
            self._block_size,
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            queries.stride(0),
            geometry.head_dim**-0.5,
            self._threads,
        )
        self._kernel(
            queries.data_ptr(),
            self._pool.keys[layer].data_ptr(),
            self._pool.values[layer].data_ptr(),
            output.data_ptr(),
            plan.blocks.data_ptr(),
            plan.ranges.data_ptr(),
            ctypes.addressof(shape),
        )
        return output


def _check_limits(geometry: Geometry, block_size: int) -> None:
    for what, value, limit in (
        ("heads", geometry.num_heads, _MAX_HEADS),
        ("head_dim", geometry.head_dim, _MAX_HEAD_DIM),
        ("block_size", block_size, _MAX_BLOCK_SIZE),
    ):
        if value > limit:
            raise CompilerError(f"{what} {value} is above the kernel's limit of {limit}")
