"""Steps for attention backends: sequences in a pool, and what their tokens must get, computed densely in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.gpu_check.cases import dense_attention
from engine.attention import Attention, Geometry, Span
from engine.kv_pool import CODES, TORCH_DTYPES, KvPool, dequantise
from protocol.layout import KvLayout

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@dataclass(kw_only=True)
class Case:
    """A step over `lengths` (start, end). Whatever no token may see is NaN, in the pool and behind each sequence."""

    lengths: Sequence[tuple[int, int]]
    dtype: str = "float32"
    kept: str | None = None  # what the pool is quantised to
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    num_shared: int = 0  # leading tokens that all sequences have in the same blocks
    seed: int = 0
    pool: KvPool = field(init=False)
    spans: list[Span] = field(init=False)
    queries: torch.Tensor = field(init=False)
    keys: torch.Tensor = field(init=False)
    values: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        layout = KvLayout(
            num_layers=1,
            block_size=self.block_size,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.kept or self.dtype,
        )
        tables = self._tables()
        self.pool = KvPool(layout, int(max(map(max, tables))) + 2, dtype=self.dtype)
        self.pool.memory[:] = b"\xff" * self.pool.memory.nbytes  # NaN, be it an element, a scale or a code of fp8
        self.spans = [
            Span(start, end, table, start if end - start == 1 else end)
            for (start, end), table in zip(self.lengths, tables, strict=True)
        ]
        self._fill(torch.Generator().manual_seed(self.seed))

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.kv_heads * self.group, self.kv_heads, self.head_dim)

    @property
    def num_tokens(self) -> int:
        return sum(end - start for start, end in self.lengths)

    def _tables(self) -> list[npt.NDArray[np.int64]]:
        """Blocks in no order; those of the shared tokens are the same for all."""
        shared = self.num_shared // self.block_size
        counts = [-(-end // self.block_size) for _, end in self.lengths]
        total = shared + sum(counts)
        free = list(np.random.default_rng(self.seed).permutation(total))
        common = [free.pop() for _ in range(shared)]
        return [
            np.array(common[:count] + [free.pop() for _ in range(count - shared)], dtype=np.int64) for count in counts
        ]

    def _fill(self, generator: torch.Generator) -> None:
        own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # a slot's K and V
        for span in self.spans:
            oldest = 0 if self.window is None else max(0, span.start - self.window + 1)
            for slot in self._slots(span, oldest).tolist():
                if slot not in own:
                    shape = (2, self.kv_heads, self.head_dim)
                    pair = torch.randn(shape, generator=generator).to(TORCH_DTYPES[self.dtype])
                    own[slot] = (pair[0], pair[1])
        slots = torch.tensor(list(own))
        self.pool.write(
            0, slots, torch.stack([key for key, _ in own.values()]), torch.stack([value for _, value in own.values()])
        )
        # As in the model: queries are a part of a wider tensor.
        shape = (self.num_tokens, self.geometry.num_heads + 2 * self.kv_heads, self.head_dim)
        wide = (2 * torch.randn(shape, generator=generator)).to(TORCH_DTYPES[self.dtype])
        self.queries = wide[:, : self.geometry.num_heads]
        now = torch.cat([self._slots(span, span.start) for span in self.spans])
        self.keys, self.values = (heads.to(TORCH_DTYPES[self.dtype]) for heads in self._read(now))

    def _read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V that lie there."""
        keys, values = (pieces[0].flatten(0, 1)[slots] for pieces in (self.pool.keys, self.pool.values))
        if self.kept is None:
            return keys, values
        code = CODES[self.kept]
        return dequantise(keys, code, torch.float32), dequantise(values, code, torch.float32)

    def _slots(self, span: Span, first: int) -> torch.Tensor:
        """Where tokens [first, end) lie."""
        tokens = np.arange(first, span.end)
        blocks = span.blocks[tokens // self.block_size]
        return torch.from_numpy(blocks * self.block_size + tokens % self.block_size)

    # -- what comes out

    def attend(self, backend: Attention) -> torch.Tensor:
        """All tokens in one step."""
        plan = backend.plan(self.spans, self.window)
        return backend.attend(0, plan, self.queries, self.keys, self.values)

    def attend_alone(self, backend: Attention) -> torch.Tensor:
        """Each sequence in a step of its own."""
        rows = np.cumsum([0, *(end - start for start, end in self.lengths)])
        parts = []
        for span, first, end in zip(self.spans, rows, rows[1:], strict=False):
            own = slice(int(first), int(end))
            plan = backend.plan([span], self.window)
            tensors = (self.queries[own], self.keys[own], self.values[own])
            parts.append(backend.attend(0, plan, *tensors))
        return torch.cat(parts)

    def expected(self) -> torch.Tensor:
        """[tokens, heads · head_dim] float64."""
        parts = []
        row = 0
        for span in self.spans:
            end_row = row + span.end - span.start
            parts.append(self._dense(span, self.queries[row:end_row]))
            row = end_row
        return torch.cat(parts)

    def _dense(self, span: Span, queries: torch.Tensor) -> torch.Tensor:
        oldest = 0 if self.window is None else max(0, span.start - self.window + 1)
        keys, values = self._read(self._slots(span, oldest))
        return dense_attention(queries, keys, values, span.start, self.window, oldest)

    def check(self, found: torch.Tensor) -> None:
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(found.double(), self.expected(), atol=tolerance, rtol=tolerance)
