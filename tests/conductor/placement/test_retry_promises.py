"""Tests of retry times of rejected requests, in virtual time: places in a queue, and admission of returns."""

import hashlib
import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonserve.conductor.events import Placed, Rejected
from moonserve.conductor.placement.admission import RETURNS_FIRST, TENANT_SHARE, AdmissionMode
from moonserve.conductor.placement.decision import Rejection
from moonserve.conductor.placement.policies.least_added_delay import Weights
from moonserve.conductor.placement.retry_promises import GRACE_S, NEWCOMER_TTFT_SHARE, PACE, RetryPromises, VirtualQueue
from moonserve.protocol.request import RequestPhase
from tests.conductor.cluster import Cluster
from tests.conductor.prediction.test_c_bindings import yields_s
from tests.thoroughness import examples

SLO_S = 2.0

# ---- places


@pytest.mark.parametrize(
    ("asked", "expected"),
    [  # earliest, seconds, now
        ([(0.0, 0.25, 100.0)] * 4 + [(0.0, 0.25, 100.9)], [100.25, 100.5, 100.75, 101.0, 101.25]),
        ([(0.0, 2.5, 100.0)] * 3, [102.5, 105.5, 108.5]),  # the seconds that a long place reaches into stay free
        # A place longer than a second reaches into the next ones. Later places turn out shorter.
        ([(0.0, 2.5, 100.0), (0.0, 2.5, 101.0), (0.0, 2.5, 102.0), (0.0, 0.5, 103.0)], [102.5, 105.5, 108.5, 104.0]),
        ([(107.3, 0.25, 100.0), (0.0, 0.25, 100.0)], [107.3, 100.25]),  # the time before stays free for others
    ],
)
def test_promised_places_follow_each_other(asked: list[tuple[float, float, float]], expected: list[float]) -> None:
    places = VirtualQueue()
    assert [places.take(*each) for each in asked] == expected


def test_shorter_places_fill_the_gaps_between_taken_ones() -> None:
    places = VirtualQueue()
    assert max(places.take(0.0, 0.25, 100.0) for _ in range(40)) == 110.0
    assert places.take(0.0, 0.0625, 101.0) == 101.3125, "behind the four of this second"
    between = [places.take(0.0, 0.0625, 101.0) for _ in range(11 + 8 * 12)]
    assert max(between) == 110.0
    assert places.take(0.0, 0.0625, 101.0) > 110.0


@example(3.0, [(0.0, 0.0)] * 3 + [(1.0, 0.0), (1.0, 0.0), (2.0, 0.0)])
@given(st.floats(0.001, 3.0), st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 8.0)), min_size=1, max_size=80))
def test_no_second_is_promised_twice(place_s: float, asked: list[tuple[float, float]]) -> None:
    places, now, taken = VirtualQueue(), 100.0, []
    for gap_s, wait_s in asked:
        now += gap_s
        taken.append(places.take(now + wait_s, place_s, now))
        assert taken[-1] >= now + max(wait_s, min(place_s, 1.0)) - 1e-9
    taken.sort()
    # An interval holds the places that fit, one that began before it, and those of the seconds at both its ends.
    for (i, first), (j, last) in itertools.combinations(enumerate(taken), 2):
        assert (j - i) * place_s <= last - first + 2 * place_s + 2.0 + 1e-9


# ---- a crowd


@dataclass
class Server:
    """One machine that takes `service_s` for each request and admits requests that would wait at most `most_s`."""

    service_s: float
    most_s: float = SLO_S
    errs: float = 0.0  # relative standard deviation of its predictions
    rng: random.Random = field(default_factory=lambda: random.Random(2))
    returns: RetryPromises = field(default_factory=RetryPromises)
    free_at: float = 0.0
    num_served: int = 0

    def ask(self, ticket: bytes, now: float) -> Rejection | None:
        wait_s = max(0.0, self.free_at - now) + self.service_s
        wait_s *= self.rng.gauss(1.0, self.errs)
        late_s = wait_s - self.most_s
        verdict = self.returns.final_rejection(
            ticket,
            Rejection(reason="ttft_slo", retry_after_s=max(0.1, late_s)) if late_s > 0 else None,
            is_crowded=wait_s > NEWCOMER_TTFT_SHARE * SLO_S,
            service_s=self.service_s,
            horizon_s=SLO_S,
            now=now,
        )
        if verdict is None:
            self.free_at = max(self.free_at, now) + self.service_s
            self.num_served += 1
        return verdict


@dataclass
class Crowd:
    """Poisson arrivals for `until_s`. A share `obeying` of rejections returns once, just after its retry time."""

    server: Server
    factor: float  # arrival rate ÷ service rate
    obeying: float
    until_s: float = 120.0
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    num_returned: int = 0
    num_let_in: int = 0  # of num_returned
    told_s: list[float] = field(default_factory=list)

    def run(self) -> None:
        events: list[tuple[float, int, bool]] = []
        at, number = 0.0, 0
        rate = self.factor / self.server.service_s
        while (at := at + self.rng.expovariate(rate)) < self.until_s:
            events.append((at, number := number + 1, False))
        heapq.heapify(events)
        while events:
            now, who, is_return = heapq.heappop(events)
            ticket = hashlib.blake2b(who.to_bytes(8), digest_size=16).digest()
            verdict = self.server.ask(ticket, now)
            if is_return and now < self.until_s:  # afterwards all are admitted
                self.num_returned += 1
                self.num_let_in += verdict is None
            if not is_return and verdict is not None:
                told_s = -(-verdict.retry_after_s // 1)  # rounded up to seconds, as in HTTP
                self.told_s.append(told_s)
                if self.rng.random() < self.obeying:
                    heapq.heappush(events, (now + told_s + self.rng.random() * 0.05, who, True))
        self.server.returns.validate()


@pytest.mark.parametrize(
    ("factor", "obeying", "most_s", "errs", "served"),
    [
        (1.5, 0.5, SLO_S, 0.0, 0.9),
        (1.5, 0.1, SLO_S, 0.0, 0.9),
        (4.0, 1.0, SLO_S, 0.0, 0.9),
        (10.0, 0.5, SLO_S, 0.0, 0.9),
        # A policy that rejects early and mispredicts.
        (4.0, 1.0, 0.6 * SLO_S, 0.1, 0.95),
        (4.0, 0.25, 0.6 * SLO_S, 0.1, 0.95),
    ],
)
def test_clients_that_wait_as_promised_are_admitted_and_the_machine_is_busy(
    factor: float, obeying: float, most_s: float, errs: float, served: float
) -> None:
    server = Server(0.05, most_s, errs)
    crowd = Crowd(server, factor, obeying)
    crowd.run()
    assert crowd.num_returned > 100
    assert crowd.num_let_in >= 0.95 * crowd.num_returned
    # 120 s is the duration of the crowd. Afterwards only returning requests arrive.
    assert server.num_served >= served * 120.0 / server.service_s


def test_places_of_absent_clients_are_given_to_others() -> None:
    """If one in ten of 60 rejected requests per second returns, retry times get short once this is learned."""
    crowd = Crowd(Server(0.05), 4.0, 0.1)
    crowd.run()
    assert max(crowd.told_s) > 30
    assert max(crowd.told_s[len(crowd.told_s) // 2 :]) <= 5
    assert crowd.num_let_in >= 0.95 * crowd.num_returned


def test_below_saturation_no_request_is_rejected() -> None:
    crowd = Crowd(Server(0.05), 0.7, 1.0, until_s=300.0)
    crowd.run()
    assert crowd.num_returned <= 0.001 * 300 * 14


@pytest.mark.parametrize("prefill_s", [0.01, 0.05, 0.1, 0.2])
def test_room_behind_new_prompts_is_used(prefill_s: float) -> None:
    """Newcomers are held below the queue length at which the policy rejects, so that returning requests find room."""
    newcomers_s = NEWCOMER_TTFT_SHARE * (1.0 - prefill_s)
    yields = yields_s(prefill_s, 1.5 * newcomers_s, 1.0, Weights())
    assert yields <= 1.0, "a prompt that is too dear yields for many objectives"


def test_early_retry_keeps_its_place_and_absent_client_loses_it() -> None:
    server = Server(0.5)
    assert [server.ask(bytes([number]), 0.0) for number in range(4)] == [None] * 4
    first = server.ask(b"x", 0.0)
    assert first is not None
    for _ in range(100):
        again = server.ask(b"x", 0.05)
        assert again is not None
        assert again.retry_after_s == pytest.approx(first.retry_after_s - 0.05)
    other = server.ask(b"y", 0.05)
    assert other is not None
    assert other.retry_after_s < first.retry_after_s + 2 * 0.5 / 0.9
    assert len(server.returns) == 2
    assert server.ask(b"much later", 100.0 + GRACE_S) is None
    assert len(server.returns) == 0


# ---- verdicts


def judge(returns: RetryPromises, ticket: bytes, rejection: Rejection | None, now: float) -> Rejection | None:
    return returns.final_rejection(ticket, rejection, is_crowded=True, service_s=0.1, horizon_s=SLO_S, now=now)


def test_rejected_retry_counts_as_returned() -> None:
    """A return that is rejected still counts as a return. Otherwise more rejections would make places shorter."""
    returns, now = RetryPromises(), 0.0
    late = Rejection(reason="ttft_slo", retry_after_s=0.1)
    for number in range(2_000):
        told = judge(returns, number.to_bytes(2), late, now)
        assert told is not None
        if number % 4 == 0:
            now += told.retry_after_s
            judge(returns, number.to_bytes(2), late, now)  # gets another place and does not return
    first, second = (judge(returns, ticket, late, now) for ticket in (b"one", b"two"))
    assert first is not None
    assert second is not None
    share = (second.retry_after_s - first.retry_after_s) * PACE / 0.1
    assert 0.15 < share < 0.25


def test_room_is_reserved_for_returning_clients_for_a_bounded_time() -> None:
    returns = RetryPromises()
    late = Rejection(reason="tbt_slo", retry_after_s=1.0)
    assert judge(returns, b"\x00", late, 0.0) == late
    held = judge(returns, b"b", None, 0.5)
    assert held is not None
    assert held.reason == RETURNS_FIRST
    assert judge(returns, b"\x00", None, 1.0) is None
    assert judge(returns, b"b", None, 0.5 + held.retry_after_s) is None
    assert judge(returns, b"c", None, 2.0) is None


@pytest.mark.parametrize("reason", [TENANT_SHARE, "ttft_slo_unreachable"])
def test_rejection_that_waiting_cannot_change_is_reported_unchanged(reason: str) -> None:
    returns, rejection = RetryPromises(), Rejection(reason=reason, retry_after_s=3.0)
    assert judge(returns, b"a", rejection, 0.0) == rejection
    assert len(returns) == 0


LATE = st.floats(0.1, 30).map(lambda s: Rejection(reason="ttft_slo", retry_after_s=s))


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | LATE, st.floats(0, 15)), max_size=60))
def test_promises_expire_and_no_wait_is_too_short(asked: list[tuple[int, Rejection | None, float]]) -> None:
    returns, now = RetryPromises(), 0.0
    for who, rejection, gap_s in asked:
        now += gap_s
        known = len(returns)
        verdict = judge(returns, bytes([who]), rejection, now)
        returns.validate()
        if rejection is not None:
            assert verdict is not None
            assert verdict.retry_after_s >= (0.0 if known else rejection.retry_after_s - 1e-6)
        assert len(returns) <= 6
    judge(returns, b"last", None, now + 10_000.0)
    assert len(returns) == 0


# ---- what a conductor without tickets tells


def test_request_that_waited_as_promised_is_admitted_after_the_queue_has_drained() -> None:
    """Three sequences of 10 ms are too many, and the first two end after 60 s. The third prompt would have queued for
    2 s. That queue will be gone, so the retry time is 1 s before the earliest landing time, and not 3 s."""
    cluster = Cluster("p0", "d0", tbt_slo_s=0.029, lease_s=1e6, admission=AdmissionMode.PREDICTED)
    for name in ("r0", "r1"):
        cluster.place(name, max_tokens=3000)
    rejected = cluster.reject("r2", max_tokens=3000)
    assert rejected.reason == "tbt_slo"
    began = cluster.now
    # 1.3 allows for the resolution of the outlook and for ends that are learned only gradually.
    for share, reply in ((0.5, Rejected), (1.3, Placed)):
        cluster.now = began + share * rejected.retry_after_s
        assert isinstance(cluster.ask("r2", max_tokens=3000), reply)


@dataclass
class World:
    """A cluster in which everything happens as predicted."""

    cluster: Cluster
    num_outputs: int
    due: list[tuple[float, str, RequestPhase]] = field(default_factory=list)

    def placed(self, name: str, reply: Placed) -> None:
        placement = reply.placement
        first_at = self.cluster.now + placement.predicted_ttft_s
        ended_at = first_at + self.num_outputs * placement.predicted_tbt_s
        self.due += [(first_at, name, RequestPhase.FIRST_TOKEN), (ended_at, name, RequestPhase.FINISHED)]

    def wait(self, seconds: float) -> None:
        until = self.cluster.now + seconds
        for at, name, phase in sorted(each for each in self.due if each[0] <= until):
            self.cluster.now = at
            self.cluster.report(name, phase, output_tokens=self.num_outputs)
        self.due = [each for each in self.due if each[0] > until]
        self.cluster.now = until


@example([301, 314, 574, 105, 80, 465], 687, 3, 1, AdmissionMode.PREDICTED)  # five rejections
@given(
    prompts=st.lists(st.integers(20, 600), min_size=3, max_size=20),
    num_outputs=st.integers(5, 800),
    num_prefill=st.integers(1, 3),
    num_decode=st.integers(1, 3),
    admission=st.sampled_from([AdmissionMode.CURRENT, AdmissionMode.PREDICTED]),
)
@settings(max_examples=examples(30), deadline=None)
def test_whoever_waits_as_told_is_admitted_where_all_goes_as_predicted(
    prompts: list[int], num_outputs: int, num_prefill: int, num_decode: int, admission: AdmissionMode
) -> None:
    """At most six rejections: one per target, one per step of the outlook's resolution, and two more, because outputs
    that end meanwhile change the expected length of the others."""
    names = [*(f"p{number}" for number in range(num_prefill)), *(f"d{number}" for number in range(num_decode))]
    cluster = Cluster(*names, ttft_slo_s=9.0, tbt_slo_s=0.055, lease_s=1e6, admission=admission)
    world = World(cluster, num_outputs)
    for number, tokens in enumerate(prompts):
        wish = {"num_prompt_tokens": tokens, "max_tokens": num_outputs}
        reply = cluster.ask(f"r{number}", **wish)
        told: list[tuple[str, float]] = []
        while isinstance(reply, Rejected) and len(told) < 6:
            assert reply.reason in ("landing_blocks", "ttft_slo", "tbt_slo")
            told.append((reply.reason, reply.retry_after_s))
            world.wait(reply.retry_after_s)
            reply = cluster.ask(f"r{number}", **wish)
        assert isinstance(reply, Placed), (number, told)
        world.placed(f"r{number}", reply)
