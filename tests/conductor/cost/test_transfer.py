"""Transfer times: a book of flows that shares links as a plain simulation does, and rates learned from their ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from conductor.cost.bandwidth import DEFAULT_BYTES_PER_S, LOCAL_BYTES_PER_S, Bandwidths
from conductor.cost.transfer import TransferBook

_MB = 1e6


def book(num_rows: int, bytes_per_s: float = 100 * _MB) -> TransferBook:
    """Endpoints on hosts of their own."""
    made = TransferBook(Bandwidths(2))
    for row in range(num_rows):
        made.join(row, host=row, bytes_per_s=bytes_per_s)
    return made


def predicted(of: TransferBook, source: int, destination: int, nbytes: float, now: float) -> float:
    return float(of.seconds(source, np.array([destination]), np.array([nbytes]), now)[0])


@dataclass(slots=True, eq=False)
class _Flow:
    source: int
    destination: int
    left: float


class _Reference:
    """The same sharing in plain loops: all links carry `rate`, in each direction."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.flows: list[_Flow] = []

    def advance(self, seconds: float) -> None:
        while seconds > 0 and any(flow.left > 0 for flow in self.flows):
            moving = [flow for flow in self.flows if flow.left > 0]
            rates = [self._rate(flow, moving) for flow in moving]
            times = [flow.left / rate for flow, rate in zip(moving, rates, strict=True)]
            step = min(seconds, *times)
            for flow, rate, time in zip(moving, rates, times, strict=True):
                flow.left = 0.0 if time <= step else flow.left - rate * step
            seconds -= step

    def _rate(self, flow: _Flow, moving: list[_Flow]) -> float:
        num_out = sum(other.source == flow.source for other in moving)
        num_in = sum(other.destination == flow.destination for other in moving)
        return self.rate / max(num_out, num_in)

    def finish(self, flow: _Flow) -> float:
        """Seconds until this flow has nothing left."""
        begin, self_s = flow.left, 0.0
        while flow.left > 0:
            step = begin / self.rate / 7
            before = flow.left
            moving = [one for one in self.flows if one.left > 0]
            rate = self._rate(flow, moving)
            soonest = min(one.left / self._rate(one, moving) for one in moving)
            step = min(step, soonest)
            self.advance(step)
            self_s += step if flow.left > 0 else before / rate
        return self_s


_sizes = st.floats(1.0, 500 * _MB)
_star = st.lists(st.tuples(_sizes, st.floats(0.0, 2.0)), min_size=0, max_size=8)


@given(_star, _sizes)
def test_where_one_link_is_the_bottleneck_the_prediction_is_exact(
    flows: list[tuple[float, float]], nbytes: float
) -> None:
    """One source, a destination each: as long as the plain simulation takes."""
    made, reference, now = book(len(flows) + 2), _Reference(100 * _MB), 0.0
    for row, (size, pause) in enumerate(flows, start=1):
        made.begin(row, 0, row, size, now)
        reference.flows.append(_Flow(0, row, size))
        now += pause
        reference.advance(pause)
    new = _Flow(0, len(flows) + 1, nbytes)
    expected = predicted(made, 0, new.destination, nbytes, now)
    reference.flows.append(new)
    assert reference.finish(new) == pytest.approx(expected, rel=1e-6, abs=1e-9)


_any_flows = st.lists(
    st.tuples(st.integers(0, 3), st.integers(4, 7), _sizes, st.floats(0.0, 2.0)), max_size=12
)


@given(_any_flows, st.integers(0, 3), st.integers(4, 7), _sizes)
def test_elsewhere_it_lies_between_its_busiest_link_and_the_shares_of_now_for_ever(
    flows: list[tuple[int, int, float, float]], source: int, destination: int, nbytes: float
) -> None:
    """Both predicted and simulated: at least the bytes alone, at most as if no other flow ever ended. And the
    prediction is never more than the simulation, since a flow that is held up elsewhere leaves its share to others."""
    made, reference, now = book(8), _Reference(100 * _MB), 0.0
    for number, (a, b, size, pause) in enumerate(flows):
        made.begin(number, a, b, size, now)
        reference.flows.append(_Flow(a, b, size))
        now += pause
        reference.advance(pause)
    expected = predicted(made, source, destination, nbytes, now)
    new = _Flow(source, destination, nbytes)
    moving = [flow for flow in reference.flows if flow.left > 0]
    slowest = reference._rate(new, [*moving, new])
    reference.flows.append(new)
    simulated = reference.finish(new)
    assert nbytes / (100 * _MB) <= expected * (1 + 1e-6)
    assert expected <= simulated * (1 + 1e-6) + 1e-9
    assert simulated <= nbytes / slowest * (1 + 1e-6) + 1e-9


@given(_any_flows, st.floats(0, 20))
def test_a_book_moves_its_flows_as_a_plain_simulation_does(
    flows: list[tuple[int, int, float, float]], later: float
) -> None:
    made, reference, now = book(8), _Reference(100 * _MB), 0.0
    for number, (source, destination, size, pause) in enumerate(flows):
        made.begin(number, source, destination, size, now)
        reference.flows.append(_Flow(source, destination, size))
        now += pause
        reference.advance(pause)
    reference.advance(later)
    for number, flow in enumerate(reference.flows):
        left = made.bytes_left(number, now + later)
        assert left == pytest.approx(flow.left, rel=1e-6, abs=1.0)
    made.validate()


@given(
    st.lists(st.tuples(st.integers(1, 7), _sizes), max_size=10),
    st.lists(_sizes, min_size=7, max_size=7),
)
def test_all_destinations_at_once_are_each_by_itself(
    flows: list[tuple[int, float]], nbytes: list[float]
) -> None:
    made = book(8)
    for number, (destination, size) in enumerate(flows):
        made.begin(number, number % 2, destination, size, 0.0)
    together = made.seconds(0, np.arange(1, 8), np.array(nbytes), 1.0)
    single = [predicted(made, 0, row, size, 1.0) for row, size in enumerate(nbytes, start=1)]
    assert together == pytest.approx(single)


def test_congestion_at_either_end_is_seen() -> None:
    """The hard term of the paper: the sender may be congested."""
    made = book(5)
    idle = predicted(made, 0, 1, 100 * _MB, 0.0)
    made.begin("from the sender", 0, 2, 300 * _MB, 0.0)
    made.begin("to a receiver", 3, 4, 50 * _MB, 0.0)
    seconds = made.seconds(0, np.array([1, 4]), np.full(2, 100 * _MB), 0.0)
    assert idle == pytest.approx(1.0)
    assert seconds == pytest.approx([2.0, 2.0])
    assert predicted(made, 1, 4, 100 * _MB, 0.0) == pytest.approx(1.5)


def test_a_flow_that_should_have_arrived_delays_nobody() -> None:
    made = book(3)
    made.begin("lost report", 0, 1, 100 * _MB, 0.0)
    assert predicted(made, 0, 2, 100 * _MB, 0.5) == pytest.approx(1.5)
    assert predicted(made, 0, 2, 100 * _MB, 5.0) == pytest.approx(1.0)
    assert "lost report" in made


def test_nothing_to_move_takes_no_time() -> None:
    made = book(3)
    made.begin("busy", 0, 1, 100 * _MB, 0.0)
    seconds = made.seconds(0, np.array([0, 1, 2]), np.array([5 * _MB, 0.0, 0.0]), 0.0)
    assert seconds.tolist() == [0.0, 0.0, 0.0]
    made.begin("itself", 2, 2, 9 * _MB, 0.0)
    assert "itself" not in made


def test_rates_fall_back_from_pair_to_end_to_default() -> None:
    made = TransferBook()
    made.join(0, host=0, bytes_per_s=4e9)
    made.join(1, host=1)
    made.join(2, host=0)
    made.join(3, host=3, bytes_per_s=2e9)
    alone = made.bandwidths.alone(0, np.array([1, 2, 3]))
    assert alone == pytest.approx([DEFAULT_BYTES_PER_S, LOCAL_BYTES_PER_S, 2e9])
    made.begin("measured", 0, 3, 5e8, 0.0)
    made.end("measured", 0.5)
    assert made.bandwidths.alone(0, np.array([3])) == pytest.approx([1e9])
    made.join(3, host=3, bytes_per_s=2e9)
    assert made.bandwidths.alone(0, np.array([3])) == pytest.approx([2e9])


def test_traffic_within_a_host_does_not_wait_for_the_network() -> None:
    made = TransferBook()
    made.join(0, host=0)
    made.join(1, host=0)
    made.join(2, host=2)
    made.begin("beyond", 0, 2, 10e9, 0.0)
    assert predicted(made, 0, 1, 5e9, 0.0) == pytest.approx(5e9 / LOCAL_BYTES_PER_S)


@given(st.floats(20.0, 400.0), st.integers(1, 6))
def test_a_pair_is_learned_beside_other_traffic(rate_mb: float, num_flows: int) -> None:
    """Flows that share a source say how fast it is, not how fast each of them was: within 10 % after 40 rounds."""
    made, rate, now = book(8), rate_mb * _MB, 0.0
    for _ in range(40):
        for row in range(1, num_flows + 1):
            made.begin(row, 0, row, 64 * _MB, now)
        now += num_flows * 64 * _MB / rate
        for row in range(1, num_flows + 1):
            made.end(row, now)
        now += 1.0
        made.validate()
    assert made.bandwidths.alone(0, np.array([1]))[0] == pytest.approx(rate, rel=0.1)
    assert predicted(made, 0, 1, 64 * _MB, now) == pytest.approx(64 * _MB / rate, rel=0.1)


def test_one_stall_hardly_counts() -> None:
    made = book(2)
    made.begin("first", 0, 1, 100 * _MB, 0.0)
    made.end("first", 1.0)
    made.begin("stalled", 0, 1, 100 * _MB, 1.0)
    made.end("stalled", 101.0)
    assert made.bandwidths.alone(0, np.array([1]))[0] > 70 * _MB


def test_small_transfers_say_nothing_about_bandwidth() -> None:
    made = book(2)
    made.begin("small", 0, 1, 1000.0, 0.0)
    made.end("small", 1.0)
    assert predicted(made, 0, 1, 100 * _MB, 1.0) == pytest.approx(1.0)


class Traffic(RuleBasedStateMachine):
    """Endpoints come and go, flows begin, end, are given up and begun again, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.book = book(4)
        self.keys: set[int] = set()
        self.ends: dict[int, tuple[int, int]] = {}
        self.now = 0.0

    @rule(key=st.integers(0, 9), a=st.integers(0, 5), b=st.integers(0, 3), size=st.floats(0, 1e10))
    def begin(self, key: int, a: int, b: int, size: float) -> None:
        self.book.begin(key, min(a, 3), b, size, self.now)
        self.keys.discard(key)
        if min(a, 3) != b and size > 0:
            self.keys.add(key)
            self.ends[key] = (min(a, 3), b)

    @rule(key=st.integers(0, 9), arrived=st.booleans())
    def finish(self, key: int, arrived: bool) -> None:
        (self.book.end if arrived else self.book.abandon)(key, self.now)
        self.keys.discard(key)

    @rule(row=st.integers(0, 3), again=st.booleans())
    def leave(self, row: int, again: bool) -> None:
        if again:
            self.book.join(row, host=row)
        else:
            self.book.leave(row)
        self.keys = {key for key in self.keys if row not in self.ends[key]}

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def holds_exactly_what_was_begun(self) -> None:
        self.book.validate()
        assert len(self.book) == len(self.keys)
        assert all(key in self.book for key in self.keys)

    @invariant()
    def predicts_finite_times(self) -> None:
        seconds = self.book.seconds(0, np.arange(4), np.full(4, 1e6), self.now)
        assert np.isfinite(seconds).all()
        assert (seconds >= 0.0).all()

    @invariant()
    def knows_one_pair_as_it_knows_many(self) -> None:
        rows, rates = np.arange(4), self.book.bandwidths
        for source in range(4):
            out, into = rates.links(source, rows)
            pairs = [rates.links_between(source, row) for row in range(4)]
            assert list(zip(out.tolist(), into.tolist(), strict=True)) == pairs
            alone = [rates.alone_between(source, row) for row in range(4)]
            assert rates.alone(source, rows).tolist() == alone


TestTraffic = Traffic.TestCase
