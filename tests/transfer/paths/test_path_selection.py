"""Path choice of slices (the cheapest path of the best working transport), cooldown of failing rails, and eviction of
connections."""

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonserve.transfer.paths.connection_pool import ConnectionPool
from moonserve.transfer.paths.path_selection import PathSelector, TransferPath
from moonserve.transfer.paths.peer_address import Rail
from moonserve.transfer.paths.rail_health import RailCondition, RailHealth
from moonserve.transfer.paths.topology import Preference, Topology

MIB = 1 << 20
HERE = "cpu:0"


def path(
    transport: str = "tcp", rail: str = "eth0", *, remote: str = "", stream: int = 0, bandwidth: float | None = None
) -> TransferPath:
    remote = remote or rail
    return TransferPath(
        transport,
        Rail(transport, rail, f"{rail}-here", bandwidth_bytes_s=bandwidth),
        Rail(transport, remote, f"{remote}-there"),
        stream,
    )


def chooser(*paths: TransferPath, topology: Topology | None = None) -> PathSelector:
    return PathSelector(paths, topology or Topology(), RailHealth())


def break_down(paths: PathSelector, broken: TransferPath, now: float) -> float:
    """Fails three times, one second apart. Returns the time from which on the path cools down."""
    for number in range(3):
        paths.sent(broken, MIB)
        paths.failed(broken, MIB, now + number)
    return now + 2


def carry(paths: PathSelector, way: TransferPath, now: float, seconds: float, times: int = 1) -> float:
    """Sends slices one after the other. Returns the arrival time of the last one."""
    for _ in range(times):
        paths.sent(way, MIB)
        now += seconds
        paths.done(way, MIB, seconds, now)
    return now


def bandwidth_of(paths: PathSelector, way: TransferPath, now: float) -> float | None:
    return paths._states[way].estimate.bandwidth(now)


def test_slices_spread_over_rails_in_proportion_to_bandwidth() -> None:
    slow, fast = path(rail="eth0", bandwidth=1e9), path(rail="eth1", bandwidth=3e9)
    paths = chooser(slow, fast)
    counts = {slow: 0, fast: 0}
    for _ in range(80):
        way = paths.choose(HERE, MIB, 0.0)
        assert way is not None
        paths.sent(way, MIB)
        counts[way] += 1
    assert counts == {slow: 20, fast: 60}


def test_measured_bandwidth_replaces_the_nominal_one_until_it_expires() -> None:
    boasting, modest = path(rail="eth0", bandwidth=10e9), path(rail="eth1", bandwidth=1e9)
    paths = chooser(boasting, modest)
    assert paths.choose(HERE, MIB, 0.0) is boasting
    now = carry(paths, boasting, 0.0, seconds=0.1, times=3)
    assert paths.choose(HERE, MIB, now) is modest
    assert bandwidth_of(paths, boasting, now) == pytest.approx(MIB / 0.1)
    assert bandwidth_of(paths, modest, now) == 1e9
    assert paths.choose(HERE, MIB, now + 11) is boasting
    now = carry(paths, boasting, now + 11, seconds=0.01)
    assert bandwidth_of(paths, boasting, now) == pytest.approx(MIB / 0.01)


def test_deep_queues_and_small_slices_do_not_lower_the_measured_bandwidth() -> None:
    way = path(bandwidth=1e9)
    paths = chooser(way, path(rail="eth1"))
    paths.sent(way, 4096)
    paths.done(way, 4096, seconds=0.01, now=0.01)
    assert bandwidth_of(paths, way, 0.01) == 1e9
    for _ in range(10):
        paths.sent(way, MIB)
    for number in range(1, 11):
        paths.done(way, MIB, seconds=0.01 * number, now=1 + 0.01 * number)
    assert bandwidth_of(paths, way, 1.1) == pytest.approx(MIB / 0.01)


def test_a_cooling_rail_gets_one_trial_and_returns_with_all_its_streams() -> None:
    bad, other, good = path(), path(stream=1), path(rail="eth1")
    paths = chooser(bad, other, good)
    now = break_down(paths, bad, 0.0)
    for _ in range(5):
        assert paths.choose(HERE, MIB, now) is good
        paths.sent(good, MIB)
    assert paths.choose(HERE, MIB, now + 30) is bad
    paths.sent(bad, MIB)
    assert paths.choose(HERE, MIB, now + 30) is good  # the trial is in flight
    paths.done(bad, MIB, 0.01, now + 30.01)
    assert paths.choose(HERE, MIB, now + 30.01) is bad
    paths.sent(bad, MIB)
    assert paths.choose(HERE, MIB, now + 30.01) is other  # the trial has succeeded


def test_the_next_transport_is_used_while_the_better_one_cools_down() -> None:
    rdma, tcp = path("rdma", "mlx5_0:1"), path("tcp")
    paths = chooser(rdma, tcp)
    assert paths.choose(HERE, MIB, 0.0) is rdma
    now = break_down(paths, rdma, 0.0)
    assert paths.choose(HERE, MIB, now) is tcp
    assert paths.choose(HERE, MIB, now + 30) is rdma


def test_if_all_rails_cool_down_the_first_to_recover_is_used() -> None:
    first, second = path(rail="eth0"), path(rail="eth1")
    paths = chooser(first, second)
    break_down(paths, second, 0.0)
    now = break_down(paths, first, 5.0)
    assert paths.choose(HERE, MIB, now) is second
    assert paths.choose(HERE, MIB, now, tried=[second]) is first
    assert paths.choose(HERE, MIB, now, tried=[first, second]) is None
    only = chooser(first)
    break_down(only, first, 0.0)
    assert only.choose(HERE, MIB, 2.0) is first


def test_a_far_rail_is_used_once_the_near_one_has_half_as_much_again_in_flight() -> None:
    far, near = path(rail="eth0", bandwidth=1e9), path(rail="eth1", bandwidth=1e9)
    paths = chooser(far, near, topology=Topology({HERE: Preference(("eth1",), ("eth0",))}))
    assert paths.choose(HERE, 4 * MIB, 0.0) is near
    paths.sent(near, MIB)
    assert paths.choose(HERE, 4 * MIB, 0.0) is near
    paths.sent(near, 2 * MIB)
    assert paths.choose(HERE, 4 * MIB, 0.0) is far
    assert paths.choose("cpu:1", MIB, 0.0) is far  # the topology does not list this memory


class ChooserMachine(RuleBasedStateMachine):
    """Any order of sends, completions and failures over three transports keeps the counters and the rules."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = [
            path("shm", "shm"),
            *(path("rdma", f"mlx5_{n}:1", remote=r) for n in range(2) for r in ("a", "b")),
            *(path("tcp", "eth0", stream=s) for s in range(2)),
        ]
        self.paths = chooser(*self.ways)
        self.health = self.paths._health
        self.in_flight: list[tuple[TransferPath, int, float]] = []
        self.now = 0.0

    @rule(seconds=st.sampled_from([0.001, 0.05, 1.0, 31.0, 301.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(nbytes=st.sampled_from([1, 4096, MIB]), tried=st.sets(st.integers(0, 6)))
    def send(self, nbytes: int, tried: set[int]) -> None:
        avoided = [self.ways[n] for n in tried]
        way = self.paths.choose(HERE, nbytes, self.now, avoided)
        assert (way is None) == (len(tried) == len(self.ways))
        if way is None:
            return
        assert way not in avoided
        if self._condition(way) is RailCondition.COOLING_DOWN:
            left = [other for other in self.ways if other not in avoided]
            assert RailCondition.HEALTHY not in map(self._condition, left)
        self.paths.sent(way, nbytes)
        self.in_flight.append((way, nbytes, self.now))

    def _condition(self, way: TransferPath) -> RailCondition:
        return self.health.condition(way.rails, self.now)

    @rule(position=st.integers(0, 1000), outcome=st.sampled_from(["done", "failed", "dropped"]))
    def end(self, position: int, outcome: str) -> None:
        if not self.in_flight:
            return
        way, nbytes, sent_at = self.in_flight.pop(position % len(self.in_flight))
        if outcome == "done":
            self.paths.done(way, nbytes, self.now - sent_at, self.now)
        else:
            getattr(self.paths, outcome)(*[way, nbytes, self.now][: 3 if outcome == "failed" else 2])

    @invariant()
    def the_accounts_are_right(self) -> None:
        self.paths.validate()
        for way, state in self.paths._states.items():
            expected = [nbytes for other, nbytes, _ in self.in_flight if other is way]
            assert (state.in_flight_slices, state.in_flight_bytes) == (len(expected), sum(expected))


TestChooserMachine = ChooserMachine.TestCase


def cooling_health(at: float = 0.0) -> RailHealth:
    """Returns the health after rail "a" failed three times: it cools down from two seconds after `at` on."""
    health = RailHealth()
    assert [health.failed("a", at + n) for n in range(3)] == [False, False, True]
    return health


def test_three_errors_within_ten_seconds_cool_down_only_that_rail_for_thirty() -> None:
    health = RailHealth()
    assert [health.failed("a", at) for at in (0.0, 5.0, 10.1, 15.2)] == [False] * 4
    assert health.failed("a", 15.3)
    assert health.condition("b", 15.3) is RailCondition.HEALTHY
    health.succeeded("a", 16.0)  # slices sent before the cooldown neither end nor lengthen it
    assert not health.failed("a", 17.0)
    assert health.condition("a", 45.2) is RailCondition.COOLING_DOWN
    assert health.condition("a", 45.3) is RailCondition.TRIAL
    health.validate()


def test_each_failed_trial_doubles_the_cooldown_up_to_five_minutes() -> None:
    health, now, lengths = cooling_health(), 2.0, []
    for _ in range(6):
        ends_at = health.cooldown_ends_at("a")
        assert ends_at is not None
        lengths.append(round(ends_at - now))
        now = ends_at
        assert health.failed("a", now)
        health.validate()
    assert lengths == [30, 60, 120, 240, 300, 300]


def test_a_successful_trial_clears_the_record() -> None:
    health = cooling_health()
    health.succeeded("a", 32.0)
    assert health.all_healthy
    assert [health.failed("a", at) for at in (33.0, 34.0, 35.0)] == [False, False, True]
    assert health.cooldown_ends_at("a") == 65.0


def test_simultaneous_errors_count_once() -> None:
    health = RailHealth()
    assert not any(health.failed("a", 0.01 * n) for n in range(5))
    assert [health.failed("a", at) for at in (0.06, 0.12)] == [False, True]


def test_old_errors_are_cleared_by_the_next_success() -> None:
    health = RailHealth()
    health.failed("a", 0.0)
    health.succeeded("a", 10.0)
    assert not health.all_healthy
    health.succeeded("a", 10.1)
    assert health.all_healthy


CAP = 4
numbers = st.integers(0, 11)


@dataclass(eq=False)
class FakeEndpoint:
    idle: bool = True
    is_open: bool = False

    def disconnect_when_idle(self) -> None:
        assert self.idle
        self.is_open = False


class Sieve:
    """Reference model: SIEVE as listed in the paper, over a plain list with the oldest key first."""

    def __init__(self) -> None:
        self.queue, self.visited, self.hand = list[int](), set[int](), 0

    def evict(self, busy: set[int]) -> int | None:
        if not set(self.queue) - busy:
            return None
        while True:
            self.hand %= len(self.queue)
            key = self.queue[self.hand]
            if key not in busy and key not in self.visited:
                self.remove(key)
                return key
            if key not in busy:
                self.visited.discard(key)
            self.hand += 1

    def remove(self, key: int) -> None:
        position = self.queue.index(key)
        del self.queue[position]
        self.visited.discard(key)
        if position < self.hand:
            self.hand -= 1
        if self.hand >= len(self.queue):
            self.hand = 0


class SieveMachine(RuleBasedStateMachine):
    """Any sequence of uses evicts as the reference model does. The cap is exceeded only while all are busy."""

    def __init__(self) -> None:
        super().__init__()
        self.endpoints = [FakeEndpoint() for _ in range(12)]
        self.pool = ConnectionPool(CAP)
        self.model = Sieve()

    @property
    def busy(self) -> set[int]:
        return {number for number, each in enumerate(self.endpoints) if not each.idle}

    @rule(number=numbers)
    def open_or_use(self, number: int) -> None:
        endpoint = self.endpoints[number]
        if endpoint.is_open:
            self.model.visited.add(number)
            self.pool.used(endpoint)
            return
        if len(self.model.queue) >= CAP:
            self.model.evict(self.busy)
        self.model.queue.append(number)
        endpoint.is_open = True
        self.pool.opened(endpoint)

    @rule(number=numbers)
    def close(self, number: int) -> None:
        endpoint = self.endpoints[number]
        if endpoint.is_open:
            self.model.remove(number)
        self.pool.closed(endpoint)
        self.pool.used(endpoint)  # ignored after the close
        endpoint.is_open, endpoint.idle = False, True

    @rule(number=numbers)
    def start_or_end_work(self, number: int) -> None:
        endpoint = self.endpoints[number]
        endpoint.idle = not endpoint.idle or not endpoint.is_open

    @rule()
    def trim(self) -> None:
        while len(self.model.queue) > CAP and self.model.evict(self.busy) is not None:
            pass
        self.pool.trim()

    @invariant()
    def agree(self) -> None:
        assert len(self.pool) == len(self.model.queue)
        opened = [number for number, each in enumerate(self.endpoints) if each.is_open]
        assert opened == sorted(self.model.queue)


TestSieveMachine = SieveMachine.TestCase
