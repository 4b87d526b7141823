"""The search finds what a landscape hides, within its bound, and the same each time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thoroughness import examples
from traces.planner.search import Cluster, Plan, Question, Score, bound, plan

TOKENS = 1 << 20


def score(effective: float, ttft_ms: float = 1000.0) -> Score:
    return Score(
        effective=effective,
        goodput=10 * effective,
        mean_ttft_ms=ttft_ms,
        p90_ttft_ms=2 * ttft_ms,
        p90_tbt_ms=50.0,
        hit_ratio=0.3,
        rejected=1 - effective,
    )


@dataclass
class Landscape:
    """Scores by a rule; counts what was asked for."""

    rule: Callable[[Cluster], float]
    asked: list[tuple[Cluster, float]] = field(default_factory=list)

    def __call__(self, clusters: Sequence[Cluster], share: float) -> list[Score]:
        assert len(set(clusters)) == len(clusters), "nothing is asked for twice at once"
        self.asked += [(cluster, share) for cluster in clusters]
        return [score(self.rule(cluster)) for cluster in clusters]

    @property
    def cost(self) -> float:
        return sum(share for _, share in self.asked)


def capacity(prefill_load: float, decode_load: float) -> Callable[[Cluster], float]:
    """What two kinds of machines leave of requests when each kind bears so much load, in machines."""

    def rule(cluster: Cluster) -> float:
        better = 1.1 if cluster.policy == "good" else 1.0
        kept = better * cluster.num_prefill / prefill_load, cluster.num_decode / decode_load
        return round(min(*kept, 1.0), 2)  # differences below a tenth of a per cent count as noise

    return rule


def question(num_machines: int, target: float = 0.9) -> Question:
    policies = ("usual", "good", "poor")
    return Question(num_machines=num_machines, target=target, policies=policies, dram_tokens=TOKENS)


def found(num_machines: int, rule: Callable[[Cluster], float], target: float = 0.9) -> Plan:
    return plan(question(num_machines, target), Landscape(rule))


@settings(max_examples=examples(100), deadline=None)
@given(
    num_machines=st.integers(2, 16),
    prefill_load=st.floats(0.5, 20),
    decode_load=st.floats(0.5, 20),
    target=st.sampled_from([0.5, 0.9, 1.0]),
)
def test_up_to_sixteen_machines_it_finds_the_best_of_all_and_the_smallest(
    num_machines: int, prefill_load: float, decode_load: float, target: float
) -> None:
    """Beside every cluster there is, in a landscape where parts of the trace tell the truth."""
    rule = capacity(prefill_load, decode_load)
    answer = found(num_machines, rule, target)

    def best_of(total: int, policies: Sequence[str]) -> float:
        return max(
            rule(Cluster(num_prefill=n, num_decode=total - n, policy=p, dram_tokens=TOKENS))
            for n in range(1, total)
            for p in policies
        )

    # Policies join when three divisions are left, so the best may be one of the usual policy's.
    assert answer.best.score.effective >= best_of(num_machines, ["usual"])
    enough = [n for n in range(2, num_machines + 1) if best_of(n, [answer.best.cluster.policy]) >= target]
    if answer.smallest is None:
        assert answer.best.score.effective < target
    else:
        assert answer.smallest.score.effective >= target
        assert answer.smallest.cluster.num_machines <= num_machines
        if answer.best.cluster.policy == "usual" and enough:
            assert answer.smallest.cluster.num_machines == enough[0]
    if answer.too_small is not None:
        assert answer.smallest is not None
        assert answer.too_small.cluster.num_machines == answer.smallest.cluster.num_machines - 1
        assert answer.too_small.score.effective < target


@settings(max_examples=examples(50), deadline=None)
@given(num_machines=st.integers(2, 300), prefill_load=st.floats(0.5, 300), decode_load=st.floats(0.5, 300))
def test_it_keeps_its_bound_and_repeats_itself(num_machines: int, prefill_load: float, decode_load: float) -> None:
    rule = capacity(prefill_load, decode_load)
    first, second = Landscape(rule), Landscape(rule)
    assert plan(question(num_machines), first) == plan(question(num_machines), second)
    assert first.asked == second.asked
    assert first.cost <= bound(question(num_machines))


def test_a_better_policy_is_found_also_between_the_divisions_that_are_tried_at_first() -> None:
    few, many = (found(number, capacity(0.9 * number, 0.3 * number)).best.cluster for number in (16, 100))
    assert (few.policy, few.division) == ("good", "11P5D")
    assert abs(many.num_prefill - 75) <= 4


def test_a_smaller_cache_is_taken_as_long_as_each_larger_one_is_enough() -> None:
    """A quarter costs too much; that an eighth is good again is luck."""
    good_by_luck = TOKENS // 8

    def rule(cluster: Cluster) -> float:
        enough = cluster.dram_tokens >= TOKENS // 2 or cluster.dram_tokens == good_by_luck
        return 0.95 if enough else 0.8

    answer = found(4, rule)
    assert [each.cluster.dram_tokens for each in answer.caches] == [TOKENS >> n for n in (1, 2, 3, 4)]
    assert answer.thrifty.cluster.dram_tokens == TOKENS // 2


@pytest.mark.parametrize("nan", [math.nan, math.inf])
def test_among_equals_the_shorter_ttft_wins_and_none_at_all_loses(nan: float) -> None:
    assert score(0.9, 500.0).merit > score(0.9, 800.0).merit > score(0.9, nan).merit
    assert score(0.91, nan).merit > score(0.9, 1.0).merit
