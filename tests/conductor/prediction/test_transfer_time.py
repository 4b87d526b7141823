"""Tests of transfer predictions: transfers in flight delay later ones, as in a simulation, and measured rates count."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moonserve.conductor.events import Register
from moonserve.conductor.prediction.transfer_time import (
    DEFAULT_BYTES_PER_S,
    LOCAL_BYTES_PER_S,
    MEASURED_FROM,
    TICK_S,
    Transfers,
)
from moonserve.protocol.request import RequestId, RequestPhase, Role
from tests.conductor.cluster import Cluster, chain, endpoint

RATE = 1e8  # of every link, in each direction
NEAR = pytest.approx


def endpoints(count: int, rate: float = RATE) -> Transfers:
    """Returns `Transfers` with `count` endpoints on different hosts."""
    transfers = Transfers()
    assert [transfers.add_endpoint(host, rate, 0.0) for host in range(count)] == list(range(count))
    return transfers


def alone(transfers: Transfers, source: int, target: int, nbytes: float, now: float) -> float:
    return float(transfers.seconds(source, np.array([target]), np.array([nbytes]), now)[0])


@dataclass
class Simulation:
    """Reference model of link sharing, in plain loops."""

    ends: list[tuple[int, int]] = field(default_factory=list)
    left: list[float] = field(default_factory=list)

    def begin(self, source: int, target: int, nbytes: float) -> None:
        self.ends.append((source, target))
        self.left.append(nbytes)

    def rate(self, flow: int) -> float:
        moving = [ends for ends, left in zip(self.ends, self.left, strict=True) if left > 0]
        source, target = self.ends[flow]
        return RATE / max(sum(a == source for a, _ in moving), sum(b == target for _, b in moving))

    def step(self, most_s: float) -> float:
        """Advances until the next flow arrives, or by `most_s`. Returns the seconds advanced."""
        rates = {flow: self.rate(flow) for flow, left in enumerate(self.left) if left > 0}
        times = {flow: self.left[flow] / rate for flow, rate in rates.items()}
        step_s = min([most_s, *times.values()])
        for flow, rate in rates.items():
            self.left[flow] = 0.0 if times[flow] <= step_s else self.left[flow] - rate * step_s
        return step_s

    def advance(self, seconds: float) -> None:
        while seconds > 0 and any(self.left):
            seconds -= self.step(seconds)

    def finish(self, flow: int) -> float:
        """Advances until `flow` has arrived. Returns the seconds advanced."""
        passed_s = 0.0
        while self.left[flow] > 0:
            passed_s += self.step(math.inf)
        return passed_s

    def formula(self, source: int, target: int, nbytes: float) -> float:
        flows = [(min(left, nbytes), a, b) for (a, b), left in zip(self.ends, self.left, strict=True)]
        out = sum(shared for shared, a, _ in flows if a == source)
        into = sum(shared for shared, _, b in flows if b == target)
        return (nbytes + max(out, into)) / RATE


SIZES = st.floats(1.0, 5e8)


# Two flows that share only their receiver.
@example([(0, 4, 2e8, 0.0), (1, 4, 2e8, 1.0)], False, set(), [2e8] * 4)
@given(
    flows=st.lists(st.tuples(st.integers(0, 3), st.integers(4, 7), SIZES, st.floats(0.0, 2.0)), max_size=12),
    is_star=st.booleans(),
    ended=st.sets(st.integers(0, 11)),
    nbytes=st.lists(SIZES | st.just(0.0), min_size=4, max_size=4),
)
def test_flows_and_predictions_equal_a_plain_simulation(
    flows: list[tuple[int, int, float, float]], is_star: bool, ended: set[int], nbytes: list[float]
) -> None:
    """Predictions equal the formula, which never exceeds the simulated time, since a flow that is held up elsewhere
    leaves its share to others. Formula and simulation agree if one link is the bottleneck of all flows."""
    transfers, simulation, now = endpoints(8), Simulation(), 100.0
    for number, (source, target, size, pause) in enumerate(flows):
        source = 0 if is_star else source
        target = 4 + number % 4 if is_star else target
        transfers.begin(RequestId(str(number)), [(source, size)], target, now)
        simulation.begin(source, target, size)
        later = math.floor((now + pause) / TICK_S) * TICK_S
        simulation.advance(later - math.floor(now / TICK_S) * TICK_S)
        now += pause
    for number in ended & set(range(len(flows))):
        transfers.end(RequestId(str(number)))
        simulation.left[number] = 0.0
    for source in range(4):
        found = transfers.seconds(source, np.arange(4, 8), np.array(nbytes), now).tolist()
        expected = [simulation.formula(source, 4 + i, size) for i, size in enumerate(nbytes)]
        expected = [each if size else 0.0 for each, size in zip(expected, nbytes, strict=True)]
        assert found == NEAR(expected, rel=1e-6, abs=1e-6)
    transfers.validate()
    if nbytes[0]:
        expected_s = simulation.formula(0, 4, nbytes[0])
        others_arrive_there = any(target == 4 for _, target in simulation.ends)
        simulation.begin(0, 4, nbytes[0])
        simulated_s = simulation.finish(len(simulation.left) - 1)
        assert expected_s <= simulated_s * (1 + 1e-6) + 1e-9
        if is_star and not others_arrive_there:
            assert expected_s == NEAR(simulated_s, rel=1e-6, abs=1e-9)


def test_empty_transfer_takes_no_time_and_overdue_flow_delays_no_other() -> None:
    transfers = endpoints(3)
    transfers.begin(RequestId("r"), [(0, RATE)], 1, 0.0)
    assert transfers.seconds(0, np.array([0, 1, 2]), np.array([5.0, 0.0, 0.0]), 0.0).tolist() == [0.0] * 3
    assert alone(transfers, 0, 2, RATE, 0.5) == NEAR(1.5)
    assert alone(transfers, 0, 2, RATE, 5.0) == NEAR(1.0)


def test_rates_fall_back_from_pair_to_link_to_default() -> None:
    transfers = Transfers()
    for host, rate in enumerate((4e9, 0.0, 2e9)):
        transfers.add_endpoint(host, rate, 0.0)
    neighbour = transfers.add_endpoint(0, 0.0, 0.0)
    rates = [transfers.uncontended_rate(0, target) for target in (1, neighbour, 2)]
    assert rates == [DEFAULT_BYTES_PER_S, LOCAL_BYTES_PER_S, 2e9]
    transfers.begin(RequestId("beyond"), [(0, 1e12)], 1, 0.0)
    assert alone(transfers, 0, neighbour, 5e9, 0.0) == NEAR(5e9 / LOCAL_BYTES_PER_S)
    transfers.observe(0, 2, 64e6, 0.064)
    assert transfers.uncontended_rate(0, 2) == 1e9
    transfers.remove_endpoint(2)
    assert transfers.add_endpoint(7, 2e9, 0.0) == 2, "numbers are used again, and nothing else"
    assert transfers.uncontended_rate(0, 2) == 2e9
    for _ in range(200):
        transfers.add_endpoint(9, 3e9, 0.0)
    assert transfers.uncontended_rate(0, 203) == 3e9, "there is room for any number"
    transfers.validate()


def test_measured_pair_is_predicted_by_its_own_rate() -> None:
    transfers = endpoints(3)
    for _ in range(40):
        transfers.observe(0, 1, 1e9, 1.0)
    assert alone(transfers, 0, 1, 1e9, 0.0) == NEAR(1.0)
    assert alone(transfers, 0, 2, 1e8, 0.0) == NEAR(1.0), "the other end was not seen to be faster"
    transfers.observe(1, 2, 1e8, 10.0)
    transfers.begin(RequestId("slow"), [(1, 1e8)], 2, 0.0)  # 10 MB/s, though its links could do more
    assert alone(transfers, 1, 0, 1e8, 5.0) == NEAR(1.5e8 / 0.93e8, rel=0.02)
    transfers.observe(0, 1, 1e9, 100.0)
    assert transfers.uncontended_rate(0, 1) > 7e8, "one stall hardly counts"
    for nbytes, seconds in ((MEASURED_FROM - 1, 1e-9), (1e9, 0.0), (1e9, math.nan), (1e9, math.inf)):
        transfers.observe(2, 1, nbytes, seconds)
    assert transfers.uncontended_rate(2, 1) == RATE, "what says nothing about bandwidth"
    transfers.validate()


SHARED = chain("a", 99)  # 1 MB each: 99 ms over the default network, 9.9 s of compute


def holder() -> Cluster:
    """Returns a cluster where one store holds `SHARED`, and two prefill workers on other hosts hold nothing."""
    cluster = Cluster("s0", "p0", "p1", "d0", threshold=1.0)
    cluster.heartbeat("s0", holds=SHARED)
    return cluster


def transfer_s(cluster: Cluster, request_id: str) -> dict[str, float]:
    """Places a prompt that begins with `SHARED` and returns the predicted transfer time of each candidate."""
    cluster.place(request_id, keys=SHARED, tokens=1000)
    decided = cluster.explain(request_id)
    return {c.instance_id: c.transfer_s for c in decided.prefill_candidates}


IDLE, BUSY = NEAR({"p0": 0.099, "p1": 0.099}), NEAR({"p0": 0.198, "p1": 0.198})


def test_busy_sender_takes_longer_until_its_bytes_have_arrived() -> None:
    """Two equal flows share the sender's link and arrive together. Then the next transfer has the link to itself."""
    cluster = holder()
    assert transfer_s(cluster, "r0") == IDLE
    assert transfer_s(cluster, "r1") == BUSY
    cluster.now += 1.0  # no report has come, but both must have arrived
    assert transfer_s(cluster, "r2") == IDLE


@pytest.mark.parametrize(
    "end", [RequestPhase.FIRST_TOKEN, RequestPhase.FAILED, RequestPhase.CANCELLED, "placed again", "workers restarted"]
)
def test_ended_request_removes_its_transfers(end: object) -> None:
    """A request that ends no longer delays other transfers. A report of its end may follow."""
    cluster = holder()
    transfer_s(cluster, "r0")
    if end == "workers restarted":
        for name in ("p0", "p1"):
            cluster.prefill(name, epoch=2)
    elif isinstance(end, RequestPhase):
        cluster.report("r0", end)
    assert transfer_s(cluster, "r0" if end == "placed again" else "r1") == IDLE
    cluster.report("r0", RequestPhase.FINISHED)


def test_rates_are_the_registered_ones() -> None:
    cluster = Cluster(threshold=1.0)
    box = endpoint("s0", host="box")
    cluster.join(Register(endpoint=box, role=Role.STORE, bytes_per_s=2e9, local_bytes_per_s=1e10))
    cluster.heartbeat("s0", holds=SHARED)
    cluster.prefill("p0", host="box", local_bytes_per_s=10e9)
    cluster.prefill("p1", bytes_per_s=0.5e9)
    cluster.prefill("p2", bytes_per_s=8e9)
    cluster.prefill("p3", home_store="s0", local_bytes_per_s=1e9)
    cluster.decode("d0")
    seconds = transfer_s(cluster, "r0")
    assert seconds == NEAR({"p0": 0.0099, "p1": 0.198, "p2": 0.0495, "p3": 0.0})
    assert cluster.explain("r0").prefill_candidates[3].load_s == NEAR(0.099)
