"""Prompts have exactly the trace's lengths and share exactly what its hash ids share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError
from tests.public_trace import TRACE, needs_trace
from traces.format import TraceRecord, read_trace
from traces.prompts import PromptBuilder, ideal_cached_tokens


def record(length: int, *hash_ids: int, tokens_per_hash: int = 8) -> TraceRecord:
    return TraceRecord(
        arrived_s=0, input_length=length, output_length=1, hash_ids=hash_ids,
        tokens_per_hash=tokens_per_hash,
    )  # fmt: skip


def common_prefix(left: list[int], right: list[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.integers(-7, 0),
)
def test_prompts_share_exactly_the_prefix_that_their_hash_ids_share(
    left: list[int], right: list[int], shorter: int
) -> None:
    builder = PromptBuilder(200)
    a = builder.prompt(record(len(left) * 8 + shorter, *left))
    b = builder.prompt(record(len(right) * 8, *right))
    assert len(a) == len(left) * 8 + shorter
    shared_ids = common_prefix(left, right)
    assert common_prefix(a, b) == min(shared_ids * 8, len(a), len(b))


def test_large_hash_ids_differ_at_once() -> None:
    builder = PromptBuilder(40)
    firsts = {tuple(builder.prompt(record(8, hash_id))[:6]) for hash_id in range(5_000)}
    assert len(firsts) == 5_000


@given(st.integers(1, 200_000), st.sampled_from([1.0, 0.5, 0.0625]))
def test_scaling_keeps_lengths_within_the_hash_ids(length: int, scale: float) -> None:
    ids = tuple(range(-(-length // 512)))
    scaled = TraceRecord(arrived_s=10, input_length=length, output_length=8, hash_ids=ids).scaled(scale, 0.5, 2.0)
    assert scaled.input_length == max(1, round(length * scale))
    assert scaled.input_length <= len(ids) * scaled.tokens_per_hash
    assert (scaled.arrived_s, scaled.output_length) == (5, 4)


def test_ideal_reuse_counts_full_blocks_seen_before_and_never_the_last_token() -> None:
    records = [record(16, 1, 2), record(20, 1, 2, 3), record(16, 1, 2), record(8, 2)]
    assert ideal_cached_tokens(records, block_size=8) == [0, 16, 8, 0]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"timestamp": 0}',
        '{"timestamp":0,"input_length":0,"output_length":1,"hash_ids":[1]}',
        '{"timestamp":0,"input_length":1e999,"output_length":1,"hash_ids":[1]}',
        '{"timestamp":NaN,"input_length":1,"output_length":1,"hash_ids":[1]}',
        '{"timestamp":Infinity,"input_length":1,"output_length":1,"hash_ids":[1]}',
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    good = json.dumps({"timestamp": 5, "input_length": 3, "output_length": 1, "hash_ids": [0]})
    path = tmp_path / "t.jsonl"
    path.write_text(f"{good}\n{line}\n")
    assert len(read_trace(path, limit=1)) == 1
    with pytest.raises(ConfigError, match=r"t\.jsonl:2"):
        read_trace(path)


def test_a_missing_or_empty_trace_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "absent")
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(tmp_path / "empty")


@needs_trace
@pytest.mark.trace
def test_the_public_trace_has_the_published_figures() -> None:
    """12,031 requests, mean input 12,035, output 343; unlimited token-weighted hit ratio 37.3 %."""
    records = read_trace(TRACE)
    inputs = sum(r.input_length for r in records)
    assert len(records) == 12_031
    assert round(inputs / len(records)) == 12_035
    assert round(sum(r.output_length for r in records) / len(records)) == 343
    assert sum(ideal_cached_tokens(records, 512)) / inputs == pytest.approx(0.373, abs=0.0005)
