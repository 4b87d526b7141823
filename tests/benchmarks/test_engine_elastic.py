"""The elastic benchmark: what its workload is, that each way serves all of it, and what its ratios say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.engine.elastic import MODEL, WAYS, Setting, activation, run, verdicts
from benchmarks.engine.elastic_load import Clock, Replica, StaticBlocks, Workload, serve
from engine.config import load_model_config

SMALL = Workload(
    burst_requests=4, burst_s=0.01, prompt_tokens=(20, 40), output_tokens=(4, 8), trickle_s=4.0
)


@pytest.fixture(scope="module")
def setting() -> Setting:
    config = load_model_config(MODEL)
    return Setting(
        config=config, layout=config.kv_layout(32, "auto"), budget_bytes=6 << 20, workload=SMALL
    )


def test_each_model_gets_a_burst_in_turn_and_equal_seeds_give_equal_requests() -> None:
    workload = replace(SMALL, burst_requests=30, trickle_s=1e9)
    arrivals = workload.arrivals(0, 4096)
    assert [arrival.model for arrival in arrivals] == [0] * 30 + [1] * 30 + [2] * 30
    assert arrivals == workload.arrivals(0, 4096)
    assert arrivals != workload.arrivals(1, 4096)
    assert arrivals[30].at_s > workload.period_s > arrivals[29].at_s
    assert {20 <= len(arrival.prompt) <= 40 for arrival in arrivals} == {True}
    assert {4 <= arrival.num_output <= 8 for arrival in arrivals} == {True}


@pytest.mark.parametrize("way", WAYS)
def test_every_request_of_every_model_gets_all_its_tokens(setting: Setting, way: str) -> None:
    arrivals = SMALL.arrivals(3, setting.config.vocab_size)
    with WAYS[way](setting) as made:
        timelines = serve(made.replicas, arrivals, Clock(), lambda: None)
        assert sorted(len(t.token_at) for t in timelines) == sorted(a.num_output for a in arrivals)
        assert min(timeline.ttft_s for timeline in timelines) > 0
        assert not any(replica.is_busy for replica in made.replicas)
        row = run(made, setting, 3)
        assert 1 <= row["largest_batch"] <= 4
        assert made.resident() <= setting.budget_bytes


def test_a_request_that_can_never_be_admitted_is_no_endless_loop(setting: Setting) -> None:
    (one,) = SMALL.arrivals(0, setting.config.vocab_size)[:1]
    with WAYS["static"](setting) as made:
        replica = Replica(made.replicas[0].engine, StaticBlocks(1))
        with pytest.raises(RuntimeError, match="too small"):
            serve([replica], [replace(one, num_output=100)], Clock(), lambda: None)


def test_a_cold_model_finds_its_memory_with_others_empty_pages_everywhere(setting: Setting) -> None:
    assert activation(setting, 1)["cold_allocate_ms"] > 0


def test_ratios_are_of_rounds_that_were_taken_in_turns() -> None:
    def rows(*p99: float) -> list[dict[str, float]]:
        return [{"ttft_p50_ms": 1.0, "ttft_p99_ms": value} for value in p99]

    found = verdicts({"static": rows(8, 2, 9), "elastic": rows(2, 1, 1), "less": rows(8, 4, 3)})
    assert found["p99_equal_memory"] == 4.0
    assert found["p99_less_memory"] == 1.0
