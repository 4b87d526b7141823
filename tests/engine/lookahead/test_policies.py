"""Admission policies over a worker's pool: who is let in, and who gives way."""

from __future__ import annotations

import pytest

from benchmarks.engine.lookahead.replay import Tables as ReplayedTables
from engine.lookahead.base import OnDemand, Policy
from engine.lookahead.lookahead import MARGIN, Costs, Lookahead
from protocol.profile import DecodeProfile, PrefillProfile
from tests.engine.lookahead.asking import Asking

# 1,000 tokens take 0.1 s to compute again; a step's constant part is 25 ms.
COSTS = Costs(decode=DecodeProfile(c0=0.025, c1=1e-4, c2=4e-8), prefill=PrefillProfile(c0=0.0, c1=1e-4, c2=0.0))


class Tables(ReplayedTables):
    """Who holds which blocks of a pool, as a policy lets them."""

    @property
    def held(self) -> list[Asking]:
        return list(self._holders.values())

    def gives_way(self, needy: Asking) -> Asking:
        return self._holders[self.victim(needy)]


def taught(num_ended: int, output: int, costs: Costs | None = None, prompt: int = 100) -> Lookahead:
    """It has seen as many requests end after `output` tokens."""
    policy = Lookahead(costs=costs)
    for number in range(num_ended):
        policy.ended(Asking(number, prompt, 10_000, generated=output), stopped=False)
    return policy


@pytest.mark.parametrize(
    ("policy", "num_blocks", "prompt", "max_tokens", "fits"),
    [
        (OnDemand(), 4, 15, 100, 2),  # one is kept for each of those who are there
        (OnDemand(per_holder=0), 4, 15, 100, 4),
        (OnDemand(kept_free=0.1, per_holder=0), 100, 15, 100, 90),
        (Lookahead(), 20, 32, 128, 2),  # nothing is known: all may use up their limits
        (taught(200, 16), 20, 32, 4096, 6),  # what others needed, not what these might
        (taught(200, 5000), 20, 31, 17, 6),  # never more than a request allows: 20 ÷ 3 blocks
    ],
    ids=["a block kept", "vLLM's", "a share kept", "unknown", "short answers", "limits"],
)
def test_as_many_are_let_in_as_the_policy_says(
    policy: Policy, num_blocks: int, prompt: int, max_tokens: int, fits: int
) -> None:
    tables = Tables(num_blocks, 16, policy)
    come = [Asking(1000 + number, prompt, max_tokens) for number in range(100)]
    for request in come:
        tables.admit(request)
    assert len(tables.held) == fits
    tables.pool.validate()


def test_lookahead_s_victim_costs_least_and_is_never_the_first_in_rank() -> None:
    tables = Tables(100, 16, taught(200, 16))
    requests = [Asking(1000 + n, prompt, 17) for n, prompt in enumerate((31, 400, 79, 200))]
    assert tables.admit(requests[0])
    assert tables.gives_way(requests[0]) is requests[0], "it is alone"
    assert tables.admit(requests[1])
    assert tables.gives_way(requests[1]) is requests[1], "though the other would cost less"
    for request in requests[2:]:
        assert tables.admit(request)
    # The third has the fewest tokens of those that free a block for each of the four.
    assert tables.gives_way(requests[1]) is requests[2]
    requests[3].priority = 1
    assert tables.gives_way(requests[1]) is requests[3]
    requests[3].priority = 0
    tables.preempt(requests[2])
    assert tables.admit(requests[2])
    assert tables.gives_way(requests[1]) is requests[3], "it gave way once and is spared"


@pytest.mark.parametrize(("num_seqs", "tokens", "share"), [(10, 1000.0, 0.5), (20, 1000.0, 0.25), (10, 2000.0, 0.25)])
def test_a_preemption_is_weighed_against_the_steps_of_an_empty_place(
    num_seqs: int, tokens: float, share: float
) -> None:
    """1,000 tokens take 0.1 s from each sequence; 4 · 5 steps give a token more for 0.025 s each."""
    assert COSTS.tolerable(num_seqs, tokens, 5.0) == pytest.approx(share)
    free = Costs(decode=COSTS.decode, prefill=PrefillProfile(c0=0.0, c1=0.0, c2=0.0))
    assert free.tolerable(num_seqs, tokens, 5.0) == 1.0


@pytest.mark.parametrize(
    ("prompt", "output", "costs", "least", "most"),
    [(30_000, 20, COSTS, MARGIN, MARGIN), (100, 2000, COSTS, 0.0, 1.0), (100, 2000, None, MARGIN, MARGIN)],
    ids=["dear", "cheap", "unknown"],
)
def test_the_margin_is_as_wide_as_preemptions_are_dear(
    prompt: int, output: int, costs: Costs | None, least: float, most: float
) -> None:
    policy = taught(200, output, costs, prompt)
    tables = Tables(100_000, 16, policy)
    for number in range(20):
        assert tables.admit(Asking(1000 + number, prompt, 10_000))
    assert least <= policy.margin <= most


def test_a_preemption_widens_the_margin_and_admissions_narrow_it_again() -> None:
    """Faster where preemptions are tolerable."""

    def widened(costs: Costs | None) -> float:
        policy = Lookahead(costs=costs)
        tables = Tables(100_000, 16, policy)
        requests = [Asking(number, 100, 2000) for number in range(2)]
        assert all(map(tables.admit, requests))
        before = policy.margin
        tables.preempt(requests[1])
        assert policy.margin > before
        assert tables.admit(requests[1])
        after = policy.margin
        for number in range(100):
            policy.admitted(Asking(number))
        assert policy.margin <= before
        return after - before

    assert widened(COSTS) < widened(None) <= 0.5


def test_a_request_that_is_withdrawn_teaches_nothing() -> None:
    policy = Lookahead()
    tables = Tables(100, 16, policy)
    request = Asking(0)
    assert tables.admit(request)
    tables.finish(request, stopped=None)
    assert tables.pool.num_free == 100
    assert policy.predictor.curve(request) is None
