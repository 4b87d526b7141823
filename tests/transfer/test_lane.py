"""One lane: whose turn it is, and that every part ends in time whatever the session does."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest

from protocol.errors import Cancelled, ConfigError, PeerLost
from tests.patience import NEVER_S, PATIENCE_S, until
from tests.transfer.conftest import TOKEN
from tests.transfer.fake_transport import FakeNetwork, Fate
from transfer import Op, RemoteSegment, Segment, Transfer, TransferEngine, TransferOptions, registry
from transfer.base import Slice
from transfer.lane import Lane

NBYTES = 1 << 16


class Bench:
    """Two engines joined by a fake network of `num_rails` rails."""

    def __init__(self, network: FakeNetwork, **options: int) -> None:
        chosen = TransferOptions(transports=("fake",), **options)  # type: ignore[arg-type]
        self.network = network
        self.near = TransferEngine(cluster_token=TOKEN, options=chosen)
        self.far = TransferEngine(cluster_token=TOKEN, options=chosen)
        self.near.start()
        self.far.start()
        self.local = self.near.allocate(NBYTES)
        self.local.buffer[:] = bytes(range(256)) * (NBYTES // 256)
        self.memory = self.far.allocate(NBYTES, readable=True)
        self.window_id = self.far.open_window(self.memory, [(0, NBYTES)])

    def close(self) -> None:
        self.near.close()
        self.far.close()

    @property
    def remote(self) -> RemoteSegment:
        return RemoteSegment(self.far.address, self.memory.segment_id)

    def write(self, start: int = 0, length: int = 4096, local: Segment | None = None) -> Transfer:
        source = local or self.local
        return Transfer(Op.WRITE, source, start, self.remote, start, length, self.window_id)

    def read(self, start: int = 0, length: int = 4096) -> Transfer:
        return Transfer(Op.READ, self.local, start, self.remote, start, length)

    @property
    def lane(self) -> Lane:
        (peer,) = self.near._peers.met.values()
        (lane,) = peer._lanes.values()
        return lane


class Orders:
    """Fates by occasion, used up one by one; ARRIVES when there are none left."""

    def __init__(self) -> None:
        self.slices: list[Fate] = []
        self.connects: list[Fate] = []
        self.fences: list[Fate] = []
        self.lists: list[Fate] = []
        self.on_slice: Callable[[], None] = lambda: None
        self.on_fence: Callable[[], None] = lambda: None
        self.on_connect: Callable[[], None] = lambda: None

    def __call__(self, occasion: str, part: Slice | None) -> Fate:
        getattr(self, f"on_{occasion}", lambda: None)()
        fates: list[Fate] = getattr(self, f"{occasion}s" if occasion != "slice" else "slices")
        return fates.pop(0) if fates else Fate.ARRIVES


@pytest.fixture
def orders() -> Orders:
    return Orders()


@pytest.fixture
def make_bench(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(num_rails: int = 1, **options: int) -> Bench:
        network = FakeNetwork(orders)
        monkeypatch.setitem(
            registry._TRANSPORTS, "fake", lambda: network.transport(num_rails=num_rails)
        )
        made.append(Bench(network, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.close()
        assert not bench.network.open_sessions


Make = Callable[..., Bench]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_batches_keep_their_deadlines_while_a_caller_has_the_session(
    make_bench: Make, orders: Orders
) -> None:
    bench = make_bench()
    bench.near.run([bench.write()], deadline_s=PATIENCE_S)
    orders.lists = [Fate.SILENT]

    def look() -> None:
        with pytest.raises(PeerLost):
            bench.near.open(bench.far.address, deadline_s=NEVER_S)

    looking = in_thread(look)
    until(lambda: bench.lane._turn.locked())
    batches = [bench.near.submit([bench.write()], deadline_s=0.1) for _ in range(3)]
    cancelled = bench.near.submit([bench.write()], deadline_s=NEVER_S)
    cancelled.cancel()
    for batch in batches:
        with pytest.raises(PeerLost):
            batch.wait(PATIENCE_S)
    with pytest.raises(Cancelled):
        cancelled.wait(PATIENCE_S)
    assert bench.lane._turn.locked()
    bench.near.forget(bench.far.address)
    looking.join()
    bench.near.run([bench.write()], deadline_s=PATIENCE_S)


def test_what_arrives_while_a_caller_connects_is_carried_afterwards(
    make_bench: Make, orders: Orders
) -> None:
    bench = make_bench()
    orders.connects = [Fate.SILENT]

    def look() -> None:
        with pytest.raises(PeerLost):
            bench.near.open(bench.far.address, deadline_s=0.5)

    looking = in_thread(look)
    until(lambda: bench.network.counts["connect", Fate.SILENT] == 1)
    batches = [bench.near.submit([bench.write()], deadline_s=PATIENCE_S) for _ in range(20)]
    for batch in batches:
        batch.wait(PATIENCE_S)
    looking.join()


def test_a_fence_that_fails_fails_its_parts_and_does_not_try_for_ever(
    make_bench: Make, orders: Orders
) -> None:
    bench = make_bench()
    orders.slices = [Fate.LOST]
    orders.fences = [Fate.LOST] * 1000
    with pytest.raises(PeerLost, match="fence"):
        bench.near.run([bench.write()], deadline_s=NEVER_S)
    assert len(orders.fences) > 990


def test_a_later_write_fences_what_an_earlier_batch_left_behind(
    make_bench: Make, orders: Orders
) -> None:
    bench = make_bench()
    orders.slices = [Fate.LATE, Fate.LOST]
    with pytest.raises(PeerLost):
        bench.near.run([bench.write()], deadline_s=PATIENCE_S)
    before = bytes(bench.memory.buffer)
    other = bench.near.allocate(NBYTES)
    other.buffer[:] = b"o" * NBYTES
    bench.near.run([bench.write(local=other)], deadline_s=PATIENCE_S)
    assert bench.network.store_what_is_late() == 0
    assert bench.memory.buffer == b"o" * 4096 + before[4096:]
    fences = sum(count for (what, _), count in bench.network.counts.items() if what == "fence")
    bench.near.run([bench.write()], deadline_s=PATIENCE_S)
    assert bench.network.counts["fence", Fate.ARRIVES] == fences  # once is enough


def test_a_peer_that_was_forgotten_and_met_again_is_fenced_as_well(
    make_bench: Make, orders: Orders
) -> None:
    bench = make_bench()
    orders.slices = [Fate.LATE, Fate.LOST]
    with pytest.raises(PeerLost):
        bench.near.run([bench.write()], deadline_s=PATIENCE_S)
    bench.near.forget(bench.far.address)
    bench.near.run([bench.write()], deadline_s=PATIENCE_S)
    assert bench.network.counts["fence", Fate.ARRIVES] >= 1
    assert bench.network.store_what_is_late() == 0


def test_a_write_that_no_thread_could_try_again_is_fenced_by_a_later_one(
    make_bench: Make, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Lane:
        raise RuntimeError("can't start new thread")

    bench = make_bench(num_rails=2)
    bench.near.run([bench.read()], deadline_s=PATIENCE_S)  # there is one lane, and no second one
    orders.slices = [Fate.LATE]
    with monkeypatch.context() as exhausted:
        exhausted.setattr("transfer.peer.Lane", refuse)
        with pytest.raises(PeerLost):
            bench.near.run([bench.write()], deadline_s=PATIENCE_S)
    bench.near.run([bench.write()], deadline_s=PATIENCE_S)
    assert bench.network.counts["fence", Fate.ARRIVES] == 1
    assert bench.network.store_what_is_late() == 0


def test_a_retried_write_fences_its_first_copy(make_bench: Make, orders: Orders) -> None:
    bench = make_bench()
    orders.slices = [Fate.LATE]
    bench.near.run([bench.write()], deadline_s=PATIENCE_S)
    bench.memory.buffer[:4096] = b"t" * 4096  # the owner has taken it and goes on
    assert bench.network.store_what_is_late() == 0
    assert bench.memory.buffer[:4096] == b"t" * 4096


def test_a_fence_that_ends_late_takes_nothing_from_a_write_that_has_gone_on(
    make_bench: Make, orders: Orders
) -> None:
    """It breaks on the first way; on the second it loses its patience with the fence, and breaks on the third one. When
    that fence ends at last, the write is on its fourth way, with the third one to be fenced."""
    bench = make_bench(num_rails=2)
    num_fences, num_connects = itertools.count(1), itertools.count(1)
    fencing: list[Lane] = []
    on_its_fourth_way = threading.Event()

    def lose_patience() -> None:
        if next(num_fences) > 1:
            return
        (peer,) = bench.near._peers.met.values()
        (lane,) = (lane for lane in list(peer._lanes.values()) if lane._groups)
        fencing.append(lane)
        lane._groups.head.give_up_at = 0.0
        lane.look_up()  # as a connection does while it waits
        assert on_its_fourth_way.wait(PATIENCE_S)

    def let_the_fence_end() -> None:
        if next(num_connects) == 4:
            on_its_fourth_way.set()
            until(lambda: not fencing[0]._turn.locked())

    orders.on_fence, orders.on_connect = lose_patience, let_the_fence_end
    orders.slices = [Fate.LATE, Fate.LATE]
    bench.near.submit([bench.write()], deadline_s=NEVER_S).wait(PATIENCE_S)
    assert bench.network.store_what_is_late() == 0


def test_a_short_batch_that_waits_for_a_connection_does_not_fail_a_long_one(
    make_bench: Make, orders: Orders
) -> None:
    bench = make_bench()
    orders.connects = [Fate.SILENT]
    short = bench.near.submit([bench.write()], deadline_s=0.2)
    until(lambda: bench.network.counts["connect", Fate.SILENT] == 1 or short.done)
    orders.connects.clear()  # on a busy machine its time is over before anybody connects
    long = bench.near.submit([bench.write()], deadline_s=PATIENCE_S)
    with pytest.raises(PeerLost):
        short.wait(PATIENCE_S)
    long.wait(PATIENCE_S)


def test_a_rail_that_does_not_connect_is_left_for_another_long_before_the_deadline(
    make_bench: Make, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.job._CONNECT_S", 0.1)
    bench = make_bench(num_rails=2)
    orders.connects = [Fate.SILENT]
    bench.near.run([bench.write()], deadline_s=NEVER_S)
    silent_s, *_ = bench.network.connect_s
    assert silent_s <= 0.1


def test_a_short_batch_behind_a_silent_long_one_takes_another_rail(
    make_bench: Make, orders: Orders
) -> None:
    bench = make_bench(num_rails=2)
    orders.slices = [Fate.SILENT]
    long = bench.near.submit([bench.write()], deadline_s=NEVER_S)
    until(lambda: bench.network.counts["slice", Fate.SILENT] == 1)
    (peer,) = bench.near._peers.met.values()
    (stuck,) = (lane for lane in peer._lanes.values() if lane._jobs)
    for _ in range(8):
        bench.near.submit([bench.write(8192)], deadline_s=PATIENCE_S).wait(PATIENCE_S)
    assert stuck._jobs
    assert not long.done
    bench.near.forget(bench.far.address)
    with pytest.raises(PeerLost):
        long.wait(PATIENCE_S)


def test_cancelled_batches_do_not_wait_behind_a_silent_peer(
    make_bench: Make, orders: Orders
) -> None:
    bench = make_bench()
    orders.slices = [Fate.SILENT]
    first = bench.near.submit([bench.write()], deadline_s=NEVER_S)
    until(lambda: bench.network.counts["slice", Fate.SILENT] == 1)
    waiting = [bench.near.submit([bench.write()], deadline_s=NEVER_S) for _ in range(3)]
    later = [batch for batch in waiting if not batch.done]
    for batch in later:
        batch.cancel()
    bench.near.forget(bench.far.address)
    for batch in (first, *waiting):
        with pytest.raises((Cancelled, PeerLost)):
            batch.wait(PATIENCE_S)


def test_an_interrupted_caller_leaves_no_half_used_session(
    make_bench: Make, orders: Orders
) -> None:
    bench = make_bench()
    bench.near.run([bench.write()], deadline_s=PATIENCE_S)

    def interrupt() -> None:
        orders.on_slice = lambda: None
        raise KeyboardInterrupt

    orders.on_slice = interrupt
    local = bench.local
    with pytest.raises(KeyboardInterrupt):
        bench.near.run([bench.read()], deadline_s=PATIENCE_S)
    assert not bench.lane.connected
    assert bench.lane.idle
    assert not local.num_users
    bench.near.run([bench.write()], deadline_s=PATIENCE_S)


def test_a_bug_of_the_transport_ends_the_batch_and_nothing_else(
    make_bench: Make, orders: Orders, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench()
    orders.slices = [Fate.BUG, Fate.BUG]
    with pytest.raises(PeerLost, match="bug"):
        bench.near.run([bench.write()], deadline_s=PATIENCE_S)
    bench.near.run([bench.write()], deadline_s=PATIENCE_S)
    assert "transfer failed" in caplog.text


def test_a_peer_that_is_forgotten_while_it_is_dialled_is_not_served_any_more(
    make_bench: Make, orders: Orders
) -> None:
    bench = make_bench()
    orders.on_slice = lambda: pytest.fail("a slice was sent")
    orders.connects = [Fate.SILENT]
    batch = bench.near.submit([bench.write()], deadline_s=NEVER_S)
    until(lambda: bench.network.counts["connect", Fate.SILENT] == 1)
    bench.near.forget(bench.far.address)
    with pytest.raises(PeerLost):
        batch.wait(PATIENCE_S)


def test_connections_beyond_the_cap_go_when_they_fall_idle(
    make_bench: Make, orders: Orders
) -> None:
    bench = make_bench(max_endpoints=1)
    bench.near.run([bench.write()], deadline_s=PATIENCE_S)
    more = [TransferEngine(cluster_token=TOKEN, options=bench.near._options) for _ in range(4)]
    try:
        for far in more:
            far.start()
            memory = far.allocate(64, readable=True)
            remote = RemoteSegment(far.address, memory.segment_id)
            bench.near.submit(
                [Transfer(Op.READ, bench.local, 0, remote, 0, 64)], deadline_s=10
            ).wait(PATIENCE_S)
        until(lambda: len(bench.network.open_sessions) == 1)
        assert len(bench.near._endpoints) == 1
    finally:
        for far in more:
            far.close()


def test_an_eviction_that_meets_a_busy_lane_is_heeded_when_it_falls_idle(
    make_bench: Make, orders: Orders
) -> None:
    bench = make_bench()
    bench.near.run([bench.write()], deadline_s=PATIENCE_S)
    lane = bench.lane
    orders.on_slice = lane.disconnect_when_idle
    bench.near.submit([bench.write(), bench.read(8192)], deadline_s=PATIENCE_S).wait(PATIENCE_S)
    orders.on_slice = lambda: None
    until(lambda: not lane.connected)


def test_no_thread_to_be_had_is_an_error_of_the_batch(
    make_bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(PeerLost, match="thread"):
            bench.near.run([bench.write()], deadline_s=PATIENCE_S)
    assert not bench.local.num_users
    bench.near.run([bench.write()], deadline_s=PATIENCE_S)


def test_an_engine_is_started_once(make_bench: Make) -> None:
    bench = make_bench()
    with pytest.raises(ConfigError, match="already"):
        bench.near.start()
    bench.near.run([bench.write()], deadline_s=PATIENCE_S)
