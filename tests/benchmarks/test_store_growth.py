"""What the store benchmark says about restarts and growth is counted, and complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.store import growth_blocks, growth_nodes, parts, replay, restart
from benchmarks.store.contestants import CONTESTANTS
from benchmarks.store.parts import Options
from benchmarks.store.report import blocks_report, nodes_report, restart_report
from benchmarks.transfer.pair import Placement
from protocol.errors import PeerLost


def options(folder: Path) -> Options:
    return Options(
        quick=True,
        full=False,
        rounds=1,
        min_s=0.001,
        sizes=["1 MiB"],
        contestants=CONTESTANTS[:1],
        placement=Placement.APART,
        gib=0.02,
        folder=folder,
        trace=folder / "no-trace",
        requests=50,
        plots=None,
    )


def test_a_made_up_trace_repeats_chains_and_goes_on() -> None:
    prompts = replay.synthetic(200)
    assert prompts == replay.synthetic(200)
    firsts = [prompt.keys[0] for prompt in prompts]
    assert 1 < len(set(firsts)) < len(firsts)
    for prompt in prompts:
        assert len(set(prompt.keys)) == len(prompt.keys)


def test_the_first_requests_of_a_trace_are_used_when_there_is_one(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n'
    trace.write_text(line * 5)
    name, prompts = replay.prompts(trace, 3)
    assert "trace.jsonl" in name
    assert [len(prompt.keys) for prompt in prompts] == [2, 2, 2]
    assert "made-up" in replay.prompts(tmp_path / "nothing", 10)[0]


def test_a_point_of_growth_tells_time_and_memory_of_its_own_process() -> None:
    points = growth_blocks.measure([(3_200, "lru"), (3_200, "fifo")])
    for point in points:
        assert 20 < point["metadata_bytes"] < 1_000
        assert min(point[name] for name in ("put_us", "lease_us", "find_s", "find_batch_s")) > 0
    assert "3,200" in blocks_report(points)


def test_a_point_that_fails_is_a_row_that_says_why() -> None:
    [point] = growth_blocks.measure([(16, "nobody")])
    assert "invalid choice" in point["failed"]
    assert "invalid choice" in blocks_report([point])


def test_a_part_that_fails_says_why_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Options) -> parts.Part:
        raise PeerLost("nobody there")

    monkeypatch.setitem(parts.PARTS, "speed", fails)
    part = parts.run("speed", options(tmp_path))
    assert "nobody there" in part.figures["failed"]
    assert not part.bars


def test_without_a_trace_the_hit_ratios_say_so(tmp_path: Path) -> None:
    assert "no trace" in parts.run("hits", options(tmp_path)).table


@pytest.mark.slow  # a node is started twice, with a disk
def test_a_restarted_node_has_all_values_and_the_same_hit_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "DRAM_BYTES", 64 << 20)
    part, bars = restart.measure(tmp_path, 0.03, ("made up", replay.synthetic(60)))
    assert part["num_found"] == part["num_values"] == part["num_read"] == 30
    assert part["num_wrong"] == 0
    assert 0 < part["replay"]["before"] == part["replay"]["after"] < 1
    assert 0 < part["serving_s"] <= part["first_hit_s"]
    assert all(bar["met"] is not False for bar in bars)
    assert "30 / 30 / 0" in restart_report(part)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # a directory and two nodes
def test_a_cluster_is_measured_with_all_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth_nodes, "NUM_VALUES", 40)
    [point] = growth_nodes.measure([2])
    assert "failed" not in point
    assert min(point["put_s"], point["get_s"], point["exists_s"], point["connect_ms"]) > 0
    assert point["directory_bytes_per_key"] > 0
    assert "| 2 |" in nodes_report([point])
