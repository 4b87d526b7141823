"""Tests that prompts have the trace's exact lengths and shared prefixes, and that errors name the broken line."""

import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.protocol.errors import ConfigError
from moonserve.traces.format import TraceRecord, read_checked, read_trace
from moonserve.traces.workload.prompts import PromptBuilder, ideal_cached_tokens

IDS = st.lists(st.integers(0, 3), min_size=1, max_size=6)


def record(length: int, *hash_ids: int) -> TraceRecord:
    return TraceRecord(arrived_s=0, input_length=length, output_length=1, hash_ids=hash_ids, tokens_per_hash=8)


def num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


@given(IDS, IDS, st.integers(-7, 0))
def test_prompts_share_exactly_what_their_hash_ids_share(left: list[int], right: list[int], shorter: int) -> None:
    builder = PromptBuilder(200)
    a = builder.prompt(record(len(left) * 8 + shorter, *left))
    b = builder.prompt(record(len(right) * 8, *right))
    assert len(a) == len(left) * 8 + shorter
    assert num_equal(a, b) == min(num_equal(left, right) * 8, len(a), len(b))


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


GOOD = {"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}


@pytest.mark.parametrize(
    ("line", "complaint", "is_record"),
    [
        ("{", " is not a trace record", False),
        ("[]", " is not a trace record", False),
        ('{"timestamp": 0}', " is not a trace record", False),
        (json.dumps(GOOD | {"hash_ids": None}), " is not a trace record", False),
        (json.dumps(GOOD | {"input_length": 0}), " has an impossible length", False),
        (json.dumps(GOOD | {"output_length": -1}), " has an impossible length", False),
        (json.dumps(GOOD).replace("600", "1e999"), " is not a trace record", False),
        (json.dumps(GOOD | {"timestamp": float("nan")}), ": timestamp is no number", False),
        (json.dumps(GOOD | {"timestamp": float("inf")}), ": timestamp is no number", False),
        (json.dumps(GOOD | {"timestamp": 4}), ": timestamp is earlier", True),
        (json.dumps(GOOD | {"timestamp": -1}), ": timestamp is no number", True),
        (json.dumps(GOOD | {"input_length": 1025}), ": input_length 1025 needs 3 hash ids", True),
    ],
)
def test_a_broken_line_is_named(line: str, complaint: str, is_record: bool, tmp_path: Path) -> None:
    """A record that only violates the format is read unless it is checked."""
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    assert not is_record or len(read_trace(path)) == 2
    for read in (read_checked,) if is_record else (read_trace, read_checked):
        assert len(read(path, limit=1)) == 1
        with pytest.raises(ConfigError, match=f"t.jsonl:2{complaint}"):
            read(path)


def test_a_missing_or_empty_trace_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for read in (read_trace, read_checked):
        with pytest.raises(ConfigError, match="cannot read"):
            read(tmp_path / "absent")
        with pytest.raises(ConfigError, match="no requests"):
            read(tmp_path / "empty")
