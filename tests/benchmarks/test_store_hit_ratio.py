"""The hit ratios that the benchmark tells are those of the trace."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks import store_hit_ratio
from benchmarks.store_hit_ratio import Belady, Prompt, measure, prompts_of, replay
from kvstore import eviction
from protocol.keys import BlockKey
from tests.public_trace import TRACE, needs_trace
from traces.format import read_trace


def prompt(*ids: int) -> Prompt:
    return Prompt(tuple(BlockKey(n.to_bytes(16, "little")) for n in ids), 512 * len(ids))


def random_prompts(seed: int, num_prompts: int = 200) -> list[Prompt]:
    """Paths in a tree: a hash id commits to the ids before it, as in a trace."""
    rng = random.Random(seed)
    ids: dict[tuple[int, ...], int] = {}
    prompts = []
    for _ in range(num_prompts):
        path = [rng.randrange(3) for _ in range(rng.randrange(1, 7))]
        starts = (tuple(path[: n + 1]) for n in range(len(path)))
        prompts.append(prompt(*(ids.setdefault(start, len(ids)) for start in starts)))
    return prompts


def test_hits_are_the_leading_blocks_that_are_still_there() -> None:
    prompts = [prompt(1, 2, 3), prompt(1, 2, 4), prompt(5, 6), prompt(1, 2, 3), prompt(1, 2, 4)]
    assert replay(eviction.make("lru"), prompts, room=100) == [0, 2, 0, 3, 3]
    assert replay(eviction.make("lru"), prompts, room=4) == [0, 2, 0, 2, 2]
    assert replay(eviction.make("lru"), prompts, room=5) == [0, 2, 0, 2, 2]
    assert replay(Belady(prompts), prompts, room=5) == [0, 2, 0, 3, 2]


def test_a_prompt_larger_than_the_store_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 blocks"):
        replay(eviction.make("lru"), [prompt(1, 2, 3)], room=2)


@pytest.mark.parametrize("name", eviction.POLICY_NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_no_policy_beats_the_optimum_and_room_for_all_is_the_same_for_all(
    name: str, seed: int
) -> None:
    prompts = random_prompts(seed)
    for room in (8, 30, 100):
        best = sum(replay(Belady(prompts), prompts, room))
        assert sum(replay(eviction.make(name), prompts, room)) <= best
    everything = replay(eviction.make("lru"), prompts, 10_000)
    assert replay(eviction.make(name), prompts, 10_000) == everything


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [1, 2]}
    trace, result = tmp_path / "trace.jsonl", tmp_path / "result.json"
    trace.write_text((json.dumps(line) + "\n") * 2)
    arguments = [str(trace), "--capacities", "2048", "--json", str(result), "--full-blocks"]
    monkeypatch.setattr(sys, "argv", ["store_hit_ratio", *arguments])
    assert store_hit_ratio.main() == 0
    assert "| lru | 0.500 (0.500) |" in capsys.readouterr().out
    points = json.loads(result.read_text())["points"]
    assert {point["policy"] for point in points} == {*eviction.POLICY_NAMES, "belady", "unlimited"}
    assert {point["block_hit_ratio"] for point in points} == {0.5}


@pytest.mark.trace
@pytest.mark.slow
@needs_trace
def test_the_conversation_trace_hits_what_was_found_and_credit_beats_lru() -> None:
    prompts = prompts_of(read_trace(TRACE))
    lru = measure("lru", eviction.make("lru"), prompts, 3_000_000)
    assert lru["token_hit_ratio"] == pytest.approx(0.138, abs=0.005)
    credit = measure("reuse-credit", eviction.make("reuse-credit"), prompts, 3_000_000)
    assert credit["block_hit_ratio"] > 1.1 * lru["block_hit_ratio"]
