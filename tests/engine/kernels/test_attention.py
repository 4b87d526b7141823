"""Attention on CPUs equals dense attention for any shape. Native kernels give the same bits however work is split.

Every pool is NaN in all places that no token may read (`Case`), so each of these tests also detects reads out of range.
"""

import ctypes
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu_check.attention_cases import AttentionCase, dense_attention
from moonserve.engine.kernels import Attention, Geometry, Span, native_attention
from moonserve.engine.kernels.native_attention import split_context
from moonserve.engine.kernels.native_library import FLAGS, load_kernels
from moonserve.engine.kernels.selector import make_attention
from moonserve.engine.kv_cache.tensors import QUANTISATIONS, TORCH_DTYPES, KvTensors, dequantise
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import KvLayout
from tests.engine.kernels.calls import kernels_folder, threads
from tests.thoroughness import examples

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@dataclass(kw_only=True)
class Case:
    """Step over `lengths` (start, end). All places that no token may read are NaN, also behind each sequence."""

    lengths: Sequence[tuple[int, int]]
    dtype: str = "float32"
    kept: str | None = None  # dtype to which the pool is quantised
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    has_sinks: bool = False
    num_shared: int = 0  # number of leading tokens that all sequences have in the same blocks
    seed: int = 0

    def __post_init__(self) -> None:
        layout = KvLayout(
            num_layers=1,
            block_size=self.block_size,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.kept or self.dtype,
        )
        self.shape = AttentionCase(
            spans=tuple(self.lengths),
            block_size=self.block_size,
            shared_blocks=self.num_shared // self.block_size,
            seed=self.seed,
        )
        self.spans = self.shape.placed()
        self.pool = KvTensors(layout, max(int(span.blocks.max()) for span in self.spans) + 2, dtype=self.dtype)
        self.pool.memory[:] = b"\xff" * self.pool.memory.nbytes  # NaN as an element, as a scale and as an fp8 code
        self._fill(torch.Generator().manual_seed(self.seed))

    @property
    def geometry(self) -> Geometry:
        heads = self.kv_heads * self.group
        return Geometry(heads, self.kv_heads, self.head_dim, (self.sinks,) if self.has_sinks else ())

    @property
    def sinks(self) -> torch.Tensor:
        """Scores below, among and above those of tokens."""
        return torch.linspace(-8, 12, self.kv_heads * self.group)

    @property
    def num_tokens(self) -> int:
        return sum(end - start for start, end in self.lengths)

    def _fill(self, generator: torch.Generator) -> None:
        own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # K and V by slot
        for span in self.spans:
            for slot in self._slots(span, self._oldest(span)).tolist():
                if slot not in own:
                    shape = (2, self.kv_heads, self.head_dim)
                    pair = torch.randn(shape, generator=generator).to(TORCH_DTYPES[self.dtype])
                    own[slot] = (pair[0], pair[1])
        slots = torch.tensor(list(own))
        self.pool.write(
            0, slots, torch.stack([key for key, _ in own.values()]), torch.stack([value for _, value in own.values()])
        )
        # As in the model, queries are a slice of a wider tensor.
        shape = (self.num_tokens, self.geometry.num_heads + 2 * self.kv_heads, self.head_dim)
        wide = (2 * torch.randn(shape, generator=generator)).to(TORCH_DTYPES[self.dtype])
        self.queries = wide[:, : self.geometry.num_heads]
        now = torch.cat([self._slots(span, span.start) for span in self.spans])
        self.keys, self.values = (heads.to(TORCH_DTYPES[self.dtype]) for heads in self._read(now))

    def _read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of the slots, dequantised if needed."""
        keys, values = (pieces[0].flatten(0, 1)[slots] for pieces in (self.pool.keys, self.pool.values))
        if self.kept is None:
            return keys, values
        code = QUANTISATIONS[self.kept]
        return dequantise(keys, code, torch.float32), dequantise(values, code, torch.float32)

    def _slots(self, span: Span, first: int) -> torch.Tensor:
        """Returns the slots of the tokens [first, end)."""
        return torch.from_numpy(self.shape.slots(span)[first:])

    # -- results

    def attend(self, backend: Attention) -> torch.Tensor:
        """Computes all tokens in one step."""
        plan = backend.plan(self.spans, self.window)
        return backend.attend(0, plan, self.queries, self.keys, self.values)

    def attend_alone(self, backend: Attention) -> torch.Tensor:
        """Computes each sequence in a step of its own."""
        parts = []
        for span, *own in zip(self.spans, *map(self._split, (self.queries, self.keys, self.values)), strict=True):
            plan = backend.plan([span], self.window)
            parts.append(backend.attend(0, plan, *own))
        return torch.cat(parts)

    def _split(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns the rows of each sequence."""
        return rows.split([end - start for start, end in self.lengths])

    def expected(self) -> torch.Tensor:
        """Returns dense attention: [tokens, heads · head_dim] float64."""
        parts, sinks = [], self.sinks if self.has_sinks else None
        for span, own in zip(self.spans, self._split(self.queries), strict=True):
            oldest = self._oldest(span)
            seen = self._read(self._slots(span, oldest))
            parts.append(dense_attention(own, *seen, span.start, self.window, oldest, sinks))
        return torch.cat(parts)

    def _oldest(self, span: Span) -> int:
        return 0 if self.window is None else max(0, span.start - self.window + 1)

    def check(self, found: torch.Tensor) -> None:
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(found.double(), self.expected(), atol=tolerance, rtol=tolerance)


DTYPES = list(TORCH_DTYPES)
POOLS = [(dtype, None) for dtype in DTYPES]
# Quantised pools. Each needs a library of its own, which takes seconds to compile.
QUANTISED = [
    pytest.param("float32", "int8"),
    pytest.param("bfloat16", "int8"),
    pytest.param("float32", "fp8", marks=pytest.mark.slow),
    pytest.param("bfloat16", "fp8", marks=pytest.mark.slow),
]
# Single tokens of many lengths, whole prompts, and chunks after cached tokens.
MIXED = [(0, 1), (15, 16), (16, 17), (599, 600), (0, 2), (0, 17), (0, 130), (70, 75), (100, 301)]
SHAPES: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"has_sinks": True, "window": 20},
    {"has_sinks": True},
    {"window": 20, "block_size": 8},
    {"window": 64, "block_size": 32},
    {"window": 200, "block_size": 1},
    {"head_dim": 40, "group": 1, "block_size": 100},
    {"head_dim": 128, "group": 7, "block_size": 256, "kv_heads": 1},
    {"head_dim": 256, "group": 2, "block_size": 512, "window": 150, "kv_heads": 1},
    {"head_dim": 4, "group": 64, "kv_heads": 1, "lengths": MIXED[:7]},
]
OTHERS: list[dict[str, Any]] = [
    {"head_dim": 2, "group": 5},
    {"head_dim": 7, "group": 4},
    {"head_dim": 16, "group": 16, "kv_heads": 1},
    {"head_dim": 80, "group": 8},
    {"head_dim": 96},
    {"lengths": [(8_191, 8_192), (8_180, 8_192)], "kv_heads": 1, "group": 2, "head_dim": 32},
    {"lengths": [(8_191, 8_192), (8_100, 8_192)], "kv_heads": 1, "group": 2, "window": 4_000},
    {"lengths": [(99, 100), (64, 90), (130, 131), (80, 200)], "num_shared": 64},
]


def make(name: str, case: Case, cache_folder: Path | None = None) -> Attention:
    return make_attention(name, case.geometry, case.pool, cache_folder or kernels_folder())


def check(case: Case) -> None:
    """Requires dense attention's values, and the same bits with two threads and with one step for each sequence."""
    alone = make("native", case)
    with threads(2):
        both = make("native", case)
    found = case.attend(alone)
    case.check(found)
    assert torch.equal(case.attend(both), found)
    assert torch.equal(case.attend_alone(alone), found)


@pytest.mark.parametrize(("dtype", "kept"), [*POOLS, *QUANTISED])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_equals_dense_attention(shape: dict[str, Any], dtype: str, kept: str | None) -> None:
    check(Case(**{"lengths": MIXED, "dtype": dtype, "kept": kept, **shape}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", OTHERS, ids=str)
def test_odd_heads_long_contexts_and_shared_blocks_equal_dense_attention(shape: dict[str, Any], dtype: str) -> None:
    check(Case(**{"lengths": MIXED, "dtype": dtype, **shape}))


@settings(max_examples=examples(25), deadline=None)
@given(
    case=st.builds(
        Case,
        lengths=st.lists(
            st.tuples(st.integers(0, 400), st.one_of(st.just(1), st.integers(1, 150))).map(
                lambda pair: (pair[0], pair[0] + pair[1])
            ),
            min_size=1,
            max_size=5,
        ),
        dtype=st.sampled_from(DTYPES),
        kept=st.sampled_from([None, "int8"]),
        kv_heads=st.integers(1, 4),
        group=st.integers(1, 8),
        head_dim=st.sampled_from([8, 24, 32, 64, 72, 128]),
        block_size=st.sampled_from([1, 16, 24, 32, 64]),
        window=st.one_of(st.none(), st.integers(1, 300)),
        seed=st.integers(0, 1_000),
    )
)
def test_any_step_equals_dense_attention(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "window"), [(16, None), (64, 20), (80, None), (128, 20)])
def test_torch_equals_dense_attention(dtype: str, head_dim: int, window: int | None) -> None:
    lengths = [(n - 1, n) for n in (1, 2, 15, 16, 17, 60, 150)] + [(10, 35), (0, 50)]
    case = Case(lengths=lengths, dtype=dtype, head_dim=head_dim, window=window)
    for piece in (*case.pool.keys, *case.pool.values):
        piece.nan_to_num_(9.0)  # the torch backend reads whole blocks
    case.check(case.attend(make("torch", case)))


@pytest.mark.parametrize(("dtype", "kept"), [*POOLS, *QUANTISED])
@pytest.mark.parametrize("window", [None, 1, 50])
def test_division_into_chunks_does_not_change_results(dtype: str, kept: str | None, window: int | None) -> None:
    """The same K and V give the same bits, whether a prompt is one chunk or several."""
    cuts = [(0, 300), (0, 37), (37, 38), (38, 235), (235, 300)]
    case = Case(lengths=cuts, dtype=dtype, kept=kept, window=window)
    slots = case.pool.num_blocks * case.block_size
    heads = torch.randn(2, slots, case.kv_heads, case.head_dim).to(case.queries.dtype)
    case.pool.write(0, torch.arange(slots), *heads)
    case.spans = [replace(s, blocks=case.spans[0].blocks, prompt_end=300) for s in case.spans]
    case.queries = torch.cat([case.queries[:300], case.queries[:300]])
    found = case.attend(make("native", case))
    assert torch.equal(found[:300], found[300:])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiler flags of x86-64")
@pytest.mark.parametrize(
    ("flag", "pools"),
    [
        ("-mno-avx512f", POOLS),
        ("-march=x86-64", POOLS),
        ("-mno-avx512f", [("bfloat16", "int8")]),
        ("-march=x86-64", [("float32", "fp8")]),
    ],
)
@pytest.mark.slow
def test_results_without_avx512_are_equal(
    flag: str, pools: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case compiles a library, with little optimisation, which takes a fraction of the time."""

    def load_older(source: Path, folder: Path | None, *, flags: Sequence[str] = FLAGS) -> ctypes.CDLL:
        return load_kernels(source, folder, flags=(*flags, "-O1", flag))

    monkeypatch.setattr(native_attention, "load_kernels", load_older)
    for dtype, kept in pools:
        case = Case(lengths=MIXED, dtype=dtype, kept=kept, head_dim=40, window=100)
        case.check(case.attend(make("native", case)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_apart_neither_overflow_nor_vanish(dtype: str) -> None:
    """Weights that differ by thousands of powers of two still add up to one."""
    case = Case(lengths=[(199, 200), (0, 100)], dtype=dtype, window=70)
    case.queries = case.queries * 3_000
    values = case.pool.values[0]
    values[~values.isnan()] = 1.0
    found = case.attend(make("native", case))
    torch.testing.assert_close(found, torch.ones_like(found))


@given(st.integers(1, 10_000), st.none() | st.integers(1, 10_000))
def test_pieces_cover_the_visible_context_and_are_cut_at_fixed_positions(end: int, window: int | None) -> None:
    pieces = split_context(end, window)
    first = 0 if window is None else max(0, end - window)
    assert [token for one in pieces for token in range(*one)] == list(range(first, end))
    assert all(start < stop for start, stop in pieces)
    assert len(pieces) <= 17  # 16 whole pieces and the rest before the first cut
    assert all(start % 256 == 0 for start, _ in pieces[1:])


def test_damaged_library_is_reported(tmp_path: Path) -> None:
    case = Case(lengths=[(0, 1)])
    make("native", case)
    (tmp_path / "kernels").mkdir()
    for library in (kernels_folder() / "kernels").glob("attention-*.so"):
        (tmp_path / "kernels" / library.name).write_bytes(b"not a library")
    with pytest.raises(ConfigError, match="not available"):
        make("native", case, tmp_path)
