"""Shares of tenants: a virtual clock of service, and places in the queue by turn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.fairness.shares import MOST_CLAIMS, OUTPUT_WEIGHT, Fairness, parse_weights
from protocol.errors import ConfigError
from protocol.ids import RequestId

HERE = np.array([0])
weights = st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0])
lengths = st.integers(1, 400)


class Queue:
    """One machine that computes a token of prompt per second, in the order that `Fairness` gives; no answers."""

    def __init__(self, **weights: float) -> None:
        self.fairness = Fairness(weights)
        self.waiting: list[tuple[float, int, RequestId]] = []
        self.jobs: list[tuple[str, int, float]] = []  # tenant, tokens, tag
        self.served: dict[str, int] = dict.fromkeys(weights, 0)
        self.now = 100.0

    def submit(self, tenant: str, tokens: int) -> None:
        number = len(self.jobs)
        request_id = RequestId(str(number))
        turn = self.fairness.turn(tenant)
        places = self.fairness.places_to_take(turn, 0, HERE)
        place = self.now if places is None else min(self.now, float(places[0]))
        self.fairness.begin(
            request_id,
            turn,
            prompt_tokens=tokens,
            output_tokens=0,
            place=place,
            link=0,
            priority=0,
        )
        self.waiting.append((place, number, request_id))
        self.jobs.append((tenant, tokens, turn.tag))
        self.now += 1e-3
        self.fairness.validate()

    def serve(self) -> int:
        """The number of the one that is next, and ends."""
        self.waiting.sort()
        _, number, request_id = self.waiting.pop(0)
        tenant, tokens, _ = self.jobs[number]
        self.now += tokens
        self.fairness.prefilled(request_id)
        self.fairness.ended(request_id, 0)
        self.fairness.validate()
        self.served[tenant] = self.served.get(tenant, 0) + tokens
        return number

    def has_waiting(self, tenant: str) -> bool:
        return any(self.jobs[number][0] == tenant for _, number, _ in self.waiting)


@given(
    st.lists(lengths, min_size=1, max_size=40),
    st.lists(lengths, min_size=1, max_size=40),
    weights,
    weights,
    st.randoms(use_true_random=False),
)
def test_two_who_always_wait_share_by_weight_within_a_prompt_of_each(
    a: list[int], b: list[int], weight_a: float, weight_b: float, order: object
) -> None:
    """Whoever came first, and in whatever order: at every moment until one has nothing left."""
    queue = Queue(a=weight_a, b=weight_b)
    both = [("a", n) for n in a] + [("b", n) for n in b]
    order.shuffle(both)  # type: ignore[attr-defined]
    for tenant, tokens in both:
        queue.submit(tenant, tokens)
    bound = max(a) / weight_a + max(b) / weight_b
    while queue.has_waiting("a") and queue.has_waiting("b"):
        queue.serve()
        assert abs(queue.served["a"] / weight_a - queue.served["b"] / weight_b) <= bound


@given(st.lists(st.tuples(st.sampled_from("abc"), lengths) | st.none(), max_size=80))
def test_the_least_tag_is_served_first_and_each_tenants_prompts_in_their_order(
    steps: list[tuple[str, int] | None],
) -> None:
    """None = the next one is served. So nobody starves: tags grow with service, and only lower ones go first."""
    queue = Queue(a=1.0, b=2.0, c=0.5)
    last: dict[str, int] = {}
    for step in [*steps, *[None] * len(steps)]:
        if step is not None:
            queue.submit(*step)
        elif queue.waiting:
            least = min(queue.jobs[number][2] for _, number, _ in queue.waiting)
            number = queue.serve()
            tenant, _, tag = queue.jobs[number]
            assert tag == least
            assert last.get(tenant, -1) < number
            last[tenant] = number
    assert not queue.waiting


@given(st.lists(lengths | st.none(), max_size=60))
def test_a_tenant_alone_waits_in_order_of_arrival_and_takes_nobodys_place(
    steps: list[int | None],
) -> None:
    queue = Queue()
    for step in steps:
        if step is None and queue.waiting:
            queue.serve()
        elif step is not None:
            assert queue.fairness.places_to_take(queue.fairness.turn("a"), 0, HERE) is None
            queue.submit("a", step)


def test_a_flood_does_not_delay_who_comes_now_and_then() -> None:
    """Two prompts at most are between a quiet tenant's arrival and its turn, though hundreds wait."""
    queue = Queue()
    for _ in range(300):
        queue.submit("flood", 10)
    for _ in range(10):
        for _ in range(5):
            queue.serve()
        queue.submit("quiet", 10)
        served = [queue.jobs[queue.serve()][0] for _ in range(3)]
        assert "quiet" in served


def test_who_was_idle_has_saved_nothing_up() -> None:
    queue = Queue()
    for _ in range(10):
        queue.submit("busy", 100)
        queue.serve()
    queue.submit("busy", 100)
    assert queue.fairness.turn("new").tag == queue.fairness.turn("new").served
    for tenant in ("busy", "new", "busy", "new"):
        queue.submit(tenant, 100)
    order = [queue.jobs[queue.serve()][0] for _ in range(5)]
    assert order in (["busy", "new", "busy", "new", "busy"], ["busy", "new", "new", "busy", "busy"])


def begun(fairness: Fairness, name: str, tenant: str, prompt: int, output: float) -> RequestId:
    request_id = RequestId(name)
    fairness.begin(
        request_id,
        fairness.turn(tenant),
        prompt_tokens=prompt,
        output_tokens=output,
        place=0.0,
        link=0,
        priority=0,
    )
    fairness.validate()
    return request_id


def test_answers_are_charged_as_they_were_and_what_was_never_computed_is_not() -> None:
    fairness = Fairness({"a": 2.0})
    begun(fairness, "else", "b", 10**6, 0)  # keeps everything in motion
    first = begun(fairness, "first", "a", 100, 10)
    assert fairness.turn("a").tag == (100 + OUTPUT_WEIGHT * 10) / 2.0
    assert fairness.turn("a").in_flight == 100 + OUTPUT_WEIGHT * 10
    fairness.prefilled(first)
    fairness.ended(first, 50)
    assert fairness.turn("a").tag == (100 + OUTPUT_WEIGHT * 50) / 2.0
    second = begun(fairness, "second", "a", 1000, 0)
    begun(fairness, "third", "a", 10, 0)
    fairness.ended(second)
    tag = fairness.turn("a").tag
    assert tag == pytest.approx((100 + OUTPUT_WEIGHT * 50 + 1000) / 2.0), "of those that wait"
    assert begun(fairness, "fourth", "a", 1, 0)
    assert fairness.turn("a").tag < tag + 20, "from then on it counts no more"
    assert fairness.turn("a").in_flight == 11


def test_prompts_of_a_machine_that_is_gone_hold_nobody_back() -> None:
    fairness = Fairness({})
    for number in range(3):
        begun(fairness, f"r{number}", "a", 100, 0)
    fairness.lost(0)
    fairness.validate()
    assert not any(fairness.waits(RequestId(f"r{n}")) for n in range(3))
    assert fairness.turn("b").tag == fairness.turn("a").tag, "all begin anew"
    fairness.ended(RequestId("r1"), 0)
    fairness.validate()


def test_a_claim_is_of_who_has_less_in_flight_until_it_is_used_or_too_old() -> None:
    fairness = Fairness({"b": 0.5})
    begun(fairness, "r0", "a", 100, 0)
    fairness.claim("b", 10.0, 1.0)
    assert fairness.claimed_until(fairness.turn("a"), 11.0) == 12.0
    assert fairness.claimed_until(fairness.turn("a"), 12.0) is None, "too old"
    assert fairness.claimed_until(fairness.turn("b"), 11.0) is None, "its own"
    begun(fairness, "r1", "b", 60, 0)
    assert fairness.claimed_until(fairness.turn("a"), 11.0) is None, "used"
    fairness.claim("b", 11.0, 1.0)
    assert fairness.claimed_until(fairness.turn("a"), 11.0) is None, "120 weighted tokens are more"


def test_claims_and_tenants_without_requests_take_no_memory() -> None:
    fairness = Fairness({})
    begun(fairness, "always", "a", 10**9, 0)
    for number in range(5000):
        fairness.claim(f"t{number}", 0.0, 1.0)
        request_id = begun_and_prefilled(fairness, number)
        fairness.ended(request_id, 0)
    fairness.validate()
    assert len(fairness._claims) <= MOST_CLAIMS
    fairness.ended(RequestId("always"))
    fairness.validate()
    assert not fairness._accounts


def begun_and_prefilled(fairness: Fairness, number: int) -> RequestId:
    request_id = RequestId(f"r{number}")
    turn = fairness.turn(f"t{number}")
    fairness.begin(
        request_id, turn, prompt_tokens=1, output_tokens=0, place=0.0, link=0, priority=0
    )
    fairness.prefilled(request_id)
    return request_id


def test_weights_are_numbers_above_0_of_each_tenant_once() -> None:
    assert parse_weights(["alice=2", "a=b=0.5"]) == {"alice": 2.0, "a=b": 0.5}
    for wrong in (["alice"], ["=2"], ["a=0"], ["a=-1"], ["a=nan"], ["a=inf"], ["a=1", "a=2"]):
        with pytest.raises(ConfigError, match="tenant-weights"):
            parse_weights(wrong)
