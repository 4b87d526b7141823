"""Admission policies over a worker's pool: which requests they admit and preempt; and the predictor they use."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.engine.lookahead.replay import BlockTables as ReplayedTables
from moonserve.engine.admission_policy import AdmissionPolicy, OnDemandPolicy
from moonserve.engine.lookahead_policy import (
    HORIZONS,
    MARGIN,
    MIN_OBSERVATIONS,
    LengthPredictor,
    LookaheadPolicy,
    PreemptionCosts,
    forecast_blocks,
)
from moonserve.protocol.request import RequestId
from moonserve.protocol.step_time import DecodeProfile, PrefillProfile
from tests.thoroughness import examples


@dataclass(slots=True, eq=False)
class Asking:
    """Request for allocators. A test may increase its number of generated tokens."""

    number: int
    num_prompt_tokens: int = 100
    max_tokens: int = 100
    generated: int = 1
    priority: int = 0
    tenant: str = ""
    blocks: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> RequestId:
        return RequestId(f"r{self.number}")

    @property
    def rank(self) -> tuple[int, int]:
        return self.priority, self.number

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.generated


# Recomputing 1,000 tokens takes 0.1 s. The constant part of a step is 25 ms.
COSTS = PreemptionCosts(
    decode=DecodeProfile(c0=0.025, c1=1e-4, c2=4e-8), prefill=PrefillProfile(c0=0.0, c1=1e-4, c2=0.0)
)


class Tables(ReplayedTables):
    """Block tables of the requests that a policy has admitted to a pool."""

    @property
    def held(self) -> list[Asking]:
        return list(self._holders.values())

    def gives_way(self, needy: Asking) -> Asking:
        return self._holders[self.victim(needy)]


def taught(num_ended: int, output: int, costs: PreemptionCosts | None = None, prompt: int = 100) -> LookaheadPolicy:
    """Returns a policy that has seen `num_ended` requests end after `output` tokens."""
    policy = LookaheadPolicy(costs=costs)
    for number in range(num_ended):
        policy.ended(Asking(number, prompt, 10_000, generated=output), hit_limit=False)
    return policy


@pytest.mark.parametrize(
    ("policy", "num_blocks", "prompt", "max_tokens", "fits"),
    [
        (OnDemandPolicy(), 4, 15, 100, 2),  # one block is kept free for each running request
        (OnDemandPolicy(per_holder=0), 4, 15, 100, 4),
        (OnDemandPolicy(kept_free=0.1, per_holder=0), 100, 15, 100, 90),
        (LookaheadPolicy(), 20, 32, 128, 2),  # without data, all requests may use up their limits
        (taught(200, 16), 20, 32, 4096, 6),  # uses the lengths of others instead of the limits
        (taught(200, 5000), 20, 31, 17, 6),  # never above the limit of a request: 20 ÷ 3 blocks
    ],
    ids=["a block kept", "vLLM's", "a share kept", "unknown", "short answers", "limits"],
)
def test_number_of_admitted_requests_follows_the_policy(
    policy: AdmissionPolicy, num_blocks: int, prompt: int, max_tokens: int, fits: int
) -> None:
    tables = Tables(num_blocks, 16, policy)
    come = [Asking(1000 + number, prompt, max_tokens) for number in range(100)]
    for request in come:
        tables.admit(request)
    assert len(tables.held) == fits
    tables.pool.validate()


def test_victim_costs_least_and_is_never_the_best_ranked() -> None:
    tables = Tables(100, 16, taught(200, 16))
    requests = [Asking(1000 + n, prompt, 17) for n, prompt in enumerate((31, 400, 79, 200))]
    assert tables.admit(requests[0])
    assert tables.gives_way(requests[0]) is requests[0], "it is alone"
    assert tables.admit(requests[1])
    assert tables.gives_way(requests[1]) is requests[1], "though the other would cost less"
    for request in requests[2:]:
        assert tables.admit(request)
    # Four requests would free a block each, and the third has the fewest tokens.
    assert tables.gives_way(requests[1]) is requests[2]
    requests[3].priority = 1
    assert tables.gives_way(requests[1]) is requests[3]
    requests[3].priority = 0
    tables.preempt(requests[2])
    assert tables.admit(requests[2])
    assert tables.gives_way(requests[1]) is requests[3], "it gave way once and is spared"


@pytest.mark.parametrize(("num_seqs", "tokens", "share"), [(10, 1000.0, 0.5), (20, 1000.0, 0.25), (10, 2000.0, 0.25)])
def test_preemption_cost_is_compared_with_gain_of_one_more_sequence(num_seqs: int, tokens: float, share: float) -> None:
    """Recomputing 1,000 tokens costs each sequence 0.1 s. An admission gains 4 · 5 steps of 0.025 s."""
    assert COSTS.tolerable(num_seqs, tokens, 5.0) == pytest.approx(share)
    free = PreemptionCosts(decode=COSTS.decode, prefill=PrefillProfile(c0=0.0, c1=0.0, c2=0.0))
    assert free.tolerable(num_seqs, tokens, 5.0) == 1.0


@pytest.mark.parametrize(
    ("prompt", "output", "costs", "least", "most"),
    [(30_000, 20, COSTS, MARGIN, MARGIN), (100, 2000, COSTS, 0.0, 1.0), (100, 2000, None, MARGIN, MARGIN)],
    ids=["dear", "cheap", "unknown"],
)
def test_margin_grows_with_the_cost_of_preemptions(
    prompt: int, output: int, costs: PreemptionCosts | None, least: float, most: float
) -> None:
    policy = taught(200, output, costs, prompt)
    tables = Tables(100_000, 16, policy)
    for number in range(20):
        assert tables.admit(Asking(1000 + number, prompt, 10_000))
    assert least <= policy.margin <= most


def test_preemption_widens_the_margin_and_admissions_narrow_it() -> None:
    """The margin widens less if preemptions are tolerable."""

    def widened(costs: PreemptionCosts | None) -> float:
        policy = LookaheadPolicy(costs=costs)
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


def test_cancelled_request_is_not_observed() -> None:
    policy = LookaheadPolicy()
    tables = Tables(100, 16, policy)
    request = Asking(0)
    assert tables.admit(request)
    tables.finish(request, stopped=None)
    assert tables.pool.num_free == 100
    assert policy.predictor.curve(request) is None


FAR = 100_000


def learned(lengths: list[int], earlier: LengthPredictor | None = None, **of: object) -> LengthPredictor:
    predictor = earlier or LengthPredictor()
    for number, length in enumerate(lengths):
        request = Asking(number, max_tokens=FAR, generated=length, **of)  # type: ignore[arg-type]
        predictor.ended(request, hit_limit=False)
    return predictor


def alive(predictor: LengthPredictor, request: Asking, steps: int) -> float:
    """Returns the probability that the request still runs after this many more tokens."""
    return float(predictor.alive([request], np.array([steps]))[0, 0])


def test_running_request_is_predicted_from_requests_of_at_least_its_length() -> None:
    """Half of the requests end after 10 tokens, the others after 1,000: one that passes 10 should reach 1,000."""
    predictor = learned([10, 1000] * 100)
    assert alive(predictor, Asking(0, max_tokens=FAR, generated=0), 20) == pytest.approx(0.5, abs=0.1)
    assert alive(predictor, Asking(0, max_tokens=FAR, generated=20), 850) > 0.9


@pytest.mark.parametrize(
    ("short", "long"),
    [({"tenant": "a"}, {"tenant": "b"}), ({"num_prompt_tokens": 20_000}, {"num_prompt_tokens": 20})],
    ids=["tenant", "prompt"],
)
def test_predictions_differ_by_tenant_and_prompt_length(short: dict[str, Any], long: dict[str, Any]) -> None:
    predictor = learned([2000] * 200, learned([8] * 200, **short), **long)
    assert alive(predictor, Asking(0, max_tokens=FAR, **short), 20) < 0.1
    assert alive(predictor, Asking(0, max_tokens=FAR, **long), 1500) > 0.9


def test_too_few_ended_requests_give_no_prediction() -> None:
    """A request is expected to use up its limit if too few requests have ended."""
    few, enough = learned([5] * (MIN_OBSERVATIONS - 1)), learned([5] * MIN_OBSERVATIONS)
    assert alive(few, Asking(0, max_tokens=300), 298) == 1.0
    assert alive(enough, Asking(0, max_tokens=300), 298) < 0.1


LENGTHS = st.lists(st.integers(1, 3000), max_size=60)


def askings(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Asking]]:
    one = st.builds(Asking, st.integers(0, 9), st.integers(1, 9000), st.integers(1, 4000), **more)
    return st.lists(one, min_size=1, max_size=8)


@settings(max_examples=examples(60), deadline=None)
@given(LENGTHS, askings(generated=st.integers(1, 4000), tenant=st.sampled_from(["", "a"])))
def test_probabilities_fall_with_time_and_are_zero_at_the_limit(lengths: list[int], requests: list[Asking]) -> None:
    alive = learned(lengths).alive(requests, HORIZONS)
    assert ((alive >= 0.0) & (alive <= 1.0 + 1e-9)).all()
    assert (np.diff(alive, axis=1) <= 1e-9).all()
    for row, request in zip(alive, requests, strict=True):
        assert not row[request.generated + HORIZONS >= request.max_tokens].any()


@settings(max_examples=examples(40), deadline=None)
@given(LENGTHS, askings(), st.floats(0.0, 4.0))
def test_peak_is_between_current_and_maximal_blocks(
    lengths: list[int], requests: list[Asking], deviations: float
) -> None:
    found = forecast_blocks(requests, learned(lengths), 16)
    now = sum(-(-each.num_tokens // 16) for each in requests)
    ever = sum(-(-(each.num_prompt_tokens + max(each.max_tokens, 1)) // 16) for each in requests)
    assert now <= found.peak(deviations) <= ever
    assert found.peak(deviations) <= found.peak(deviations + 1.0)
    assert (found.mean <= found.most + 1e-6)[1:].all()


def test_mean_and_variance_equal_those_of_samples() -> None:
    """64 requests at different points of lognormal answers are compared with 4,000 random draws of their totals."""
    draw = np.random.default_rng(3)
    lengths = np.maximum(np.round(draw.lognormal(5.5, 0.8, 5000)), 1).astype(int)
    predictor = learned(lengths.tolist())
    requests = [Asking(n, 50 + 20 * n, FAR, generated=1 + 12 * (n % 16)) for n in range(64)]
    found = forecast_blocks(requests, predictor, 16)
    for index in (8, 12, 16):  # 16, 64 and 256 steps ahead
        steps = int(HORIZONS[index])
        totals = np.zeros(4000)
        for request in requests:
            longer = lengths[lengths > request.generated]
            ends = draw.choice(longer, 4000)
            held = -(-(request.num_tokens + steps) // 16)
            totals += np.where(ends > request.generated + steps, held, 0)
        assert found.mean[index] == pytest.approx(totals.mean(), rel=0.06)
        assert found.variance[index] ** 0.5 == pytest.approx(totals.std(), rel=0.15)


def test_steps_to_end_follow_the_lengths_of_answers() -> None:
    """Requests that end after 1,000 tokens: of 20 at evenly spread positions, one ends every 50 steps."""
    predictor = learned([1000] * 200)
    requests = [Asking(n, 100, FAR, generated=25 + 50 * n) for n in range(20)]
    assert forecast_blocks(requests, predictor, 16).steps_to_end == pytest.approx(50, rel=0.5)
    assert forecast_blocks(requests[:1], predictor, 16).steps_to_end == pytest.approx(975, rel=0.5)
