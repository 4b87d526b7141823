"""The comparison of allocators: its replay is right step by step, equal for equal seeds, and its claims hold small."""

from __future__ import annotations

from collections import deque

import pytest

from benchmarks.engine.lookahead.__main__ import POLICIES, Load, dominates, replay, verdict
from benchmarks.engine.lookahead.figures import as_table
from benchmarks.engine.lookahead.load import LIMITS, SYNTHETIC, Wish, synthetic
from benchmarks.engine.lookahead.replay import Replay, Worker
from engine.lookahead.allocator import Allocator
from engine.lookahead.base import Policy
from engine.lookahead.worst_case import WorstCase
from protocol.profile import DecodeProfile, PrefillProfile

WORKER = Worker(
    decode=DecodeProfile(c0=0.02, c1=1e-4, c2=4e-8),
    prefill=PrefillProfile(c0=0.0, c1=1e-4, c2=1e-9),
    num_blocks=2000,
)
SMALL = {"documents": 600_000, "reasoning": 100_000, "chat": 100_000}


def run(wishes: list[Wish], policy: Policy) -> Replay:
    found = Replay(wishes, WORKER, Allocator(WORKER.num_blocks, WORKER.block_size, policy))
    found.run()
    found.allocator.validate()
    return found


def step_by_step(wishes: list[Wish], worker: Worker) -> tuple[float, list[float]]:
    """The worst case, one step after the other: when all is done, and each request's wait."""
    free, now, waits = worker.num_blocks, 0.0, []
    arrivals, waiting = deque(sorted(wishes, key=lambda wish: wish.arrived_s)), deque[Wish]()
    running: list[list[int]] = []  # tokens, steps left, blocks
    while arrivals or waiting or running:
        if not (waiting or running):
            now = max(now, arrivals[0].arrived_s)
        while arrivals and arrivals[0].arrived_s <= now:
            waiting.append(arrivals.popleft())
        while waiting:
            wish = waiting[0]
            blocks = min(-(-(wish.prompt + wish.limit) // worker.block_size), worker.num_blocks)
            if blocks > free:
                break
            free -= blocks
            waits.append(now - waiting.popleft().arrived_s)
            running.append([wish.prompt + 1, wish.output - 1, blocks])
        now += worker.decode.step_s(len(running), sum(each[0] for each in running))
        for each in running:
            each[0] += 1
            each[1] -= 1
        free += sum(each[2] for each in running if not each[1])
        running = [each for each in running if each[1]]
    return now, waits


@pytest.mark.parametrize("per_s", [0.5, 3.0, 1e9])
def test_runs_of_steps_take_what_the_steps_take(per_s: float) -> None:
    wishes = synthetic(SYNTHETIC["chat"], 60, per_s, seed=4)
    found = run(wishes, WorstCase())
    now_s, waits = step_by_step(wishes, WORKER)
    assert found.now_s == pytest.approx(now_s, rel=1e-9)
    ours = sorted(each.waited_s for each in found.ended)
    assert ours == pytest.approx(sorted(waits), abs=1e-6)


def test_one_alone_waits_for_nobody_and_its_steps_are_a_series() -> None:
    found = run([Wish(5.0, 1000, 101, 200)], WorstCase())
    expected_s = sum(WORKER.decode.step_s(1, 1001 + step) for step in range(100))
    assert found.now_s == pytest.approx(5.0 + expected_s)
    assert found.ended[0].waited_s == 0.0
    assert found.sums.generated == 100


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", sorted(SYNTHETIC.keys() - {"documents"}))
def test_every_request_gets_every_token_whoever_gave_way(policy: str, kind: str) -> None:
    wishes = synthetic(SYNTHETIC[kind], 60, 20.0, seed=5)
    found = run(wishes, POLICIES[policy]())
    assert len(found.ended) == len(wishes)
    assert found.sums.generated == sum(wish.output - 1 for wish in wishes)
    assert found.allocator.num_free == WORKER.num_blocks
    counters = found.allocator.counters
    assert counters.admissions == len(wishes) + counters.preemptions
    assert found.sums.recomputed <= counters.preempted_tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_seeds_give_equal_figures(policy: str) -> None:
    def once() -> dict[str, float]:
        load = Load("chat", synthetic(SYNTHETIC["chat"], 60, 1e9, seed=6), 30_000)
        found = replay(load, POLICIES[policy]())
        del found["us_per_call"]
        return found

    assert once() == once()


@pytest.mark.parametrize("kind", SMALL)
def test_lookahead_dominates_on_demand_and_the_worst_case(kind: str) -> None:
    """In virtual time: fewer preemptions than on-demand at no less throughput, more throughput than the worst case."""
    load = Load(kind, synthetic(SYNTHETIC[kind], 300, 1e9, seed=7), SMALL[kind])
    rows = {name: replay(load, make()) for name, make in POLICIES.items()}
    assert dominates(rows), verdict(rows)
    assert rows["worst case"]["preemptions"] == rows["worst case"]["reallocations"] == 0.0
    for name in ("runs", "reallocations", "calls"):
        assert rows["lookahead"][name] < rows["on-demand"][name], name
    for row in rows.values():
        assert 0.0 < row["pool_utilisation"] <= row["utilisation"] <= 1.0
    assert len(as_table(list(rows.items())).splitlines()) == 2 + len(POLICIES)


def test_what_is_allowed_is_never_less_than_what_comes() -> None:
    wishes = synthetic(SYNTHETIC["reasoning"], 500, 1.0, seed=8)
    assert all(wish.output <= wish.limit for wish in wishes)
    assert {wish.limit for wish in wishes} > set(LIMITS)
    assert any(wish.stopped for wish in wishes)


def test_a_verdict_says_no_where_on_demand_is_faster() -> None:
    rows = {name: {"tokens_per_s": 1.0, "preemptions": 5.0} for name in POLICIES}
    rows["lookahead"] = {"tokens_per_s": 0.9, "preemptions": 0.0}
    rows["worst case"] = {"tokens_per_s": 0.5, "preemptions": 0.0}
    assert verdict(rows).endswith("dominates: NO")
    rows["lookahead"]["tokens_per_s"] = 1.0
    assert verdict(rows).endswith("dominates: yes")
