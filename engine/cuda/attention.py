"""`Attention` in Triton: decode is split over the context, prompt chunks are computed tile by tile.

Single tokens come first in a step and are one attention call, chunks another. K and V are read from the pool only, and
nothing behind a sequence's end. Plans are made on the host, without waiting for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from moonserve.engine.cuda.device import require_triton
from moonserve.engine.cuda.streams import to_device
from moonserve.engine.kernels import Geometry, Span
from moonserve.protocol.errors import ConfigError

if TYPE_CHECKING:
    from moonserve.engine.cuda.attention_kernels import ChunkBatch, DecodeBatch

MAX_HEAD_DIM = 256


class Pool(Protocol):
    """Tensors of the KV pool: per layer a K and a V [num_blocks, block_size, kv_heads, head_dim]."""

    @property
    def keys(self) -> Sequence[torch.Tensor]: ...

    @property
    def values(self) -> Sequence[torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned step: its first rows are single tokens, the others chunks."""

    singles: "DecodeBatch | None"  # None = no single tokens
    chunks: "ChunkBatch | None"  # None = no chunks
    window: int | None


class TritonAttention:
    """`Attention` for CUDA devices, and for any device in Triton's interpreter. Raises ConfigError if it cannot run."""

    name = "triton"
    reads_whole_blocks = False

    def __init__(self, geometry: Geometry, pool: Pool) -> None:
        self._pool = pool
        self._device = pool.keys[0].device
        require_triton(self._device)
        if geometry.head_dim > MAX_HEAD_DIM:
            raise ConfigError(f"Triton attention takes heads of up to {MAX_HEAD_DIM}, not {geometry.head_dim}")
        from moonserve.engine.cuda import attention_kernels  # imports triton

        self._kernels = attention_kernels
        group = geometry.num_heads // geometry.num_kv_heads
        shared = attention_kernels.shared_bytes_of(self._device)
        tiling = attention_kernels.tiling_for(geometry.head_dim, pool.keys[0].element_size(), group, shared)
        self._tokens_per_tile = tiling.tokens_per_tile(group)

    def order(self, lengths: Sequence[tuple[int, int]]) -> list[int]:
        """Returns single tokens first, then chunks."""
        return sorted(range(len(lengths)), key=lambda i: lengths[i][1] - lengths[i][0] > 1)

    def plan(self, spans: Sequence[Span], window: int | None) -> Plan:
        singles = list(takewhile(lambda span: span.end - span.start == 1, spans))
        chunks = spans[len(singles) :]  # a single token among them is a short chunk
        return Plan(
            self._plan_singles(singles, window) if singles else None,
            self._plan_chunks(chunks, len(singles)) if chunks else None,
            window,
        )

    def _plan_singles(self, spans: Sequence[Span], window: int | None) -> "DecodeBatch":
        ends = np.array([span.end for span in spans], dtype=np.int32)
        num_parts = self._kernels.parts_for(int(ends.max()), window)
        return self._kernels.DecodeBatch(self._to_device(_tables(spans)), self._to_device(ends), num_parts)

    def _plan_chunks(self, spans: Sequence[Span], first_row: int) -> "ChunkBatch":
        lengths = [span.end - span.start for span in spans]
        rows = first_row + np.cumsum([0, *lengths[:-1]])
        chunks = [(int(row), one.start, one.end) for row, one in zip(rows, spans, strict=True)]
        tiles = self._kernels.plan_tiles(chunks, self._tokens_per_tile)
        return self._kernels.ChunkBatch(self._to_device(_tables(spans)), self._to_device(tiles))

    def _to_device(self, array: npt.NDArray[np.int32]) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self._device)

    def attend(
        self,
        layer: int,
        plan: Plan,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Implements `Attention.attend`. `keys` and `values` are not used, since they are in the pool."""
        if queries.stride()[1:] != (queries.shape[2], 1):
            queries = queries.contiguous()
        pool_keys, pool_values = self._pool.keys[layer], self._pool.values[layer]
        output = queries.new_empty((queries.shape[0], queries.shape[1] * queries.shape[2]))
        if plan.singles is not None:
            self._kernels.decode_attention(queries, pool_keys, pool_values, plan.singles, plan.window, output)
        if plan.chunks is not None:
            self._kernels.prefill_attention(queries, pool_keys, pool_values, plan.chunks, plan.window, output)
        return output


def table_columns(num_blocks: int) -> int:
    """Returns the row length of a table for up to `num_blocks` blocks, a multiple of 16: Triton would compile a kernel
    again for rows that are not aligned."""
    return -(-num_blocks // 16) * 16


def _tables(spans: Sequence[Span]) -> npt.NDArray[np.int32]:
    """Returns the block tables as one array, padded with block 0, which is not read."""
    columns = table_columns(max(len(span.blocks) for span in spans))
    tables = np.zeros((len(spans), columns), dtype=np.int32)
    for row, span in zip(tables, spans, strict=True):
        row[: len(span.blocks)] = span.blocks
    return tables
