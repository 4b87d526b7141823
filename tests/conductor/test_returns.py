"""Who was rejected and comes back when told is let in, whatever comes meanwhile: a queue in virtual time."""

from __future__ import annotations

import hashlib
import heapq
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.admission import RETURNS_FIRST, TENANT_SHARE
from conductor.decision import Rejection
from conductor.policies.least_added_delay import Terms, yields_s
from conductor.returns import GRACE_S, NEWCOMER_TTFT_SHARE, PACE, Returns

SLO_S = 2.0


@dataclass
class Server:
    """One machine that takes `service_s` for each request, and lets in whoever would wait no longer than `most_s`."""

    service_s: float
    most_s: float = SLO_S
    errs: float = 0.0  # standard deviation of its predictions, as a share
    rng: random.Random = field(default_factory=lambda: random.Random(2))
    returns: Returns = field(default_factory=Returns)
    free_at: float = 0.0
    num_served: int = 0

    def ask(self, ticket: bytes, now: float) -> Rejection | None:
        wait_s = max(0.0, self.free_at - now) + self.service_s
        wait_s *= self.rng.gauss(1.0, self.errs)
        late_s = wait_s - self.most_s
        rejection = (
            Rejection(reason="ttft_slo", retry_after_s=max(0.1, late_s)) if late_s > 0 else None
        )
        verdict = self.returns.judge(
            ticket,
            rejection,
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
    """Poisson arrivals for `until_s`; a share of who is rejected comes back once, a moment after it was told."""

    server: Server
    rate: float
    obeying: float
    until_s: float
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    num_returned: int = 0
    num_let_in: int = 0  # of these
    told_s: list[float] = field(default_factory=list)

    def run(self) -> None:
        events: list[tuple[float, int, bool]] = []
        at, number = 0.0, 0
        while (at := at + self.rng.expovariate(self.rate)) < self.until_s:
            events.append((at, number := number + 1, False))
        heapq.heapify(events)
        while events:
            now, who, is_return = heapq.heappop(events)
            verdict = self.server.ask(_digest(who), now)
            if is_return and now < self.until_s:  # afterwards everybody is
                self.num_returned += 1
                self.num_let_in += verdict is None
            if not is_return and verdict is not None:
                told_s = -(-verdict.retry_after_s // 1)  # whole seconds, as HTTP tells them
                self.told_s.append(told_s)
                if self.rng.random() < self.obeying:
                    heapq.heappush(events, (now + told_s + self.rng.random() * 0.05, who, True))


def _digest(who: int) -> bytes:
    return hashlib.blake2b(who.to_bytes(8), digest_size=16).digest()


@pytest.mark.parametrize("obeying", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("factor", [1.5, 4.0, 10.0])
def test_who_obeys_is_let_in_and_the_machine_is_not_idle(factor: float, obeying: float) -> None:
    server = Server(service_s=0.05)
    crowd = Crowd(server, rate=factor / server.service_s, obeying=obeying, until_s=120.0)
    crowd.run()
    server.returns.validate()
    assert crowd.num_returned > 100
    assert crowd.num_let_in >= 0.95 * crowd.num_returned
    # While the crowd lasts; afterwards only those who return are there.
    assert server.num_served >= 0.9 * 120.0 / server.service_s


@pytest.mark.parametrize("obeying", [1.0, 0.25])
def test_what_was_promised_is_kept_by_a_policy_that_refuses_early_and_errs(obeying: float) -> None:
    server = Server(service_s=0.05, most_s=0.6 * SLO_S, errs=0.1)
    crowd = Crowd(server, rate=4.0 / server.service_s, obeying=obeying, until_s=120.0)
    crowd.run()
    assert crowd.num_returned > 500
    assert crowd.num_let_in >= 0.95 * crowd.num_returned
    assert server.num_served >= 0.95 * 120.0 / server.service_s


def test_places_of_those_who_do_not_come_are_given_to_others() -> None:
    """Of 60 refused in a second one in ten comes, fewer than are served. At first nobody knows, and all get a place."""
    server = Server(service_s=0.05)
    crowd = Crowd(server, rate=4.0 / server.service_s, obeying=0.1, until_s=120.0)
    crowd.run()
    assert max(crowd.told_s) > 30
    assert max(crowd.told_s[len(crowd.told_s) // 2 :]) <= 5
    assert crowd.num_let_in >= 0.95 * crowd.num_returned


def test_who_comes_and_is_refused_has_come() -> None:
    """Else places would be given away more freely the more of those who had one were refused."""
    returns, now = Returns(), 0.0
    late = Rejection(reason="ttft_slo", retry_after_s=0.1)
    for number in range(2_000):
        told = judge(returns, number.to_bytes(2), late, now)
        assert told is not None
        if number % 4 == 0:
            now += told.retry_after_s
            judge(
                returns, number.to_bytes(2), late, now
            )  # it gets another place, and does not come
    first, second = (judge(returns, ticket, late, now) for ticket in (b"one", b"two"))
    assert first is not None
    assert second is not None
    share = (second.retry_after_s - first.retry_after_s) * PACE / 0.1
    assert 0.15 < share < 0.25


@pytest.mark.parametrize("prefill_s", [0.01, 0.05, 0.1, 0.2])
def test_behind_newcomers_there_is_room_that_the_policy_gives(prefill_s: float) -> None:
    """It refuses long before the objective, and where newcomers fill the queue up to there, nobody can return."""
    newcomers_s = NEWCOMER_TTFT_SHARE * (1.0 - prefill_s)
    yields = yields_s(prefill_s, 1.5 * newcomers_s, 1.0, Terms())
    assert yields <= 1.0, "a prompt that is too dear yields for many objectives"


def test_below_saturation_nobody_is_turned_away_for_others() -> None:
    server = Server(service_s=0.05)
    crowd = Crowd(server, rate=0.7 / server.service_s, obeying=1.0, until_s=300.0)
    crowd.run()
    assert crowd.num_returned <= 0.001 * 300 * 14


def test_who_asks_before_its_time_keeps_its_place_and_gains_nothing() -> None:
    server = Server(service_s=0.5)
    for number in range(4):
        assert server.ask(bytes([number]), 0.0) is None
    first = server.ask(b"x", 0.0)
    assert first is not None
    for _ in range(100):
        again = server.ask(b"x", 0.05)
        assert again is not None
        assert again.retry_after_s == pytest.approx(first.retry_after_s - 0.05)
    other = server.ask(b"y", 0.05)
    assert other is not None
    assert other.retry_after_s < first.retry_after_s + 2 * 0.5 / 0.9


def test_those_who_do_not_come_are_forgotten() -> None:
    server = Server(service_s=0.5)
    for number in range(20):
        server.ask(bytes([number]), 0.0)
    assert len(server.returns) > 10
    assert server.ask(b"much later", 100.0 + GRACE_S) is None
    assert len(server.returns) == 0


def judge(
    returns: Returns, ticket: bytes, rejection: Rejection | None, now: float
) -> Rejection | None:
    return returns.judge(
        ticket, rejection, is_crowded=True, service_s=0.1, horizon_s=SLO_S, now=now
    )


def test_room_is_kept_for_who_is_to_return_and_not_for_ever() -> None:
    returns = Returns()
    late = Rejection(reason="tbt_slo", retry_after_s=1.0)
    told = judge(returns, b"\x00", late, 0.0)
    assert told == late
    held = judge(returns, b"b", None, 0.5)
    assert held is not None
    assert held.reason == RETURNS_FIRST
    assert judge(returns, b"\x00", None, 1.0) is None
    assert judge(returns, b"b", None, 0.5 + held.retry_after_s) is None
    assert judge(returns, b"c", None, 2.0) is None


def test_what_waiting_does_not_change_is_told_as_it_is() -> None:
    returns = Returns()
    for reason in (TENANT_SHARE, "ttft_slo_unreachable"):
        rejection = Rejection(reason=reason, retry_after_s=3.0)
        assert judge(returns, b"a", rejection, 0.0) == rejection
    assert len(returns) == 0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.none()
            | st.floats(0.1, 30).map(lambda s: Rejection(reason="ttft_slo", retry_after_s=s)),
            st.floats(0, 15),
        ),
        max_size=60,
    )
)
def test_whatever_happens_promises_end_and_nobody_waits_less_than_the_load_needs(
    asked: list[tuple[int, Rejection | None, float]],
) -> None:
    returns, now = Returns(), 0.0
    for who, rejection, gap_s in asked:
        now += gap_s
        known = len(returns)
        verdict = judge(returns, bytes([who]), rejection, now)
        returns.validate()
        if rejection is not None:
            assert verdict is not None
            assert verdict.retry_after_s >= 0.0
            if not known:
                assert verdict.retry_after_s >= rejection.retry_after_s - 1e-6
        assert len(returns) <= 6
    judge(returns, b"last", None, now + 10_000.0)
    assert len(returns) == 0
