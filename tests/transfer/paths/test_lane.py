"""One lane: batches take turns, every part ends in time whatever the session does, and a WRITE that may still arrive is
fenced before its memory is used again."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from moonserve.protocol.errors import Cancelled, PeerLost
from moonserve.transfer import Op, RemoteSegment, Transfer
from moonserve.transfer.paths.lane import Lane
from moonserve.transfer.paths.traffic_stats import Incident
from tests.patience import NEVER_S, PATIENCE_S, until
from tests.transfer.conftest import RAILS, Make, MakePair, Pair, run
from tests.transfer.fault_injection import FaultInjector, Outcome

TRANSPORTS = ["tcp"]
pytestmark = pytest.mark.usefixtures("injector")  # must be set up before the engines
NBYTES = 1 << 16


@pytest.fixture
def bench(make_pair: MakePair) -> Pair:
    return make_pair(NBYTES)


def write(bench: Pair, at: int = 0) -> Transfer:
    return bench.write(at, at, 4096)


def lanes_of(bench: Pair) -> list[Lane]:
    (peer,) = bench.near._peers.by_address.values()
    return list(peer._lanes.values())


def test_batches_keep_their_deadlines_while_a_caller_has_the_session(bench: Pair, injector: FaultInjector) -> None:
    bench.run(write(bench))
    injector.orders["list"] = [Outcome.SILENT]
    threads = ThreadPoolExecutor(1)
    looking = threads.submit(bench.near.open, bench.far.address, deadline_s=NEVER_S)
    (lane,) = lanes_of(bench)
    until(lane._session_lock.locked)
    batches = [bench.near.submit([write(bench)], deadline_s=0.1) for _ in range(3)]
    cancelled = bench.near.submit([write(bench)], deadline_s=NEVER_S)
    cancelled.cancel()
    for batch in batches:
        with pytest.raises(PeerLost):
            batch.wait(PATIENCE_S)
    with pytest.raises(Cancelled):
        cancelled.wait(PATIENCE_S)
    assert lane._session_lock.locked()
    bench.near.forget(bench.far.address)
    with threads, pytest.raises(PeerLost):
        looking.result()
    bench.run(write(bench))


def test_a_batch_that_times_out_while_connecting_does_not_fail_the_others(bench: Pair, injector: FaultInjector) -> None:
    """A batch with a later deadline, or one submitted while a caller connects, is carried afterwards."""
    for give_up in (
        lambda: bench.near.submit([write(bench)], deadline_s=0.3).wait(PATIENCE_S),
        lambda: bench.near.open(bench.far.address, deadline_s=0.3),
    ):
        injector.orders["connect"] = [Outcome.SILENT]
        injector.counts.clear()
        with ThreadPoolExecutor(1) as threads:
            failing = threads.submit(give_up)
            until(lambda: injector.counts["connect", Outcome.SILENT] or failing.done())  # noqa: B023
            injector.orders["connect"].clear()  # on a busy machine the deadline may pass before the attempt
            batches = [bench.near.submit([write(bench)], deadline_s=PATIENCE_S) for _ in range(10)]
            for batch in batches:
                batch.wait(PATIENCE_S)
            with pytest.raises(PeerLost):
                failing.result()
        bench.near.forget(bench.far.address)


def test_a_slow_connect_moves_to_another_rail_long_before_the_deadline(
    make_pair: MakePair, injector: FaultInjector, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_pair(NBYTES, rails=RAILS)
    with monkeypatch.context() as patched:
        patched.setattr("moonserve.transfer.paths.lane_queue._CONNECT_S", 0.1)
        injector.orders["connect"] = [Outcome.SILENT]
        injector.on["connect"] = patched.undo  # the other rail gets the normal timeout
        bench.run(write(bench), deadline_s=NEVER_S)
    assert injector.connect_s[0] <= 0.1


def test_a_short_batch_behind_a_silent_one_moves_to_another_rail(make_pair: MakePair, injector: FaultInjector) -> None:
    bench = make_pair(NBYTES, rails=RAILS)
    injector.orders["slice"] = [Outcome.SILENT]
    long = bench.near.submit([write(bench)], deadline_s=NEVER_S)
    until(lambda: injector.counts["slice", Outcome.SILENT])
    (stuck,) = (lane for lane in lanes_of(bench) if lane._jobs)
    for _ in range(8):
        bench.run(write(bench, 8192))
    assert stuck._jobs
    assert not long.done
    bench.near.forget(bench.far.address)
    with pytest.raises(PeerLost):
        long.wait(PATIENCE_S)


def test_a_cancelled_batch_starts_no_more_slices_and_finishes_those_in_flight(
    bench: Pair, injector: FaultInjector
) -> None:
    bench.run(write(bench))
    under_way, go_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        under_way.set()
        assert go_on.wait(PATIENCE_S)

    injector.on["slice"] = stand_still
    first = bench.near.submit([write(bench)], deadline_s=NEVER_S)
    assert under_way.wait(PATIENCE_S)
    injector.on.clear()
    second = bench.near.submit([write(bench)], deadline_s=NEVER_S)
    for batch in (first, second):
        batch.cancel()
    assert not first.done
    go_on.set()
    first.wait(PATIENCE_S)
    with pytest.raises(Cancelled):
        second.wait(PATIENCE_S)
    assert not any(stats.incidents[Incident.FAILURE] for stats in bench.near.stats)
    bench.run(write(bench))


def test_an_interrupted_caller_closes_its_session(bench: Pair, injector: FaultInjector) -> None:
    bench.run(write(bench))

    def interrupt() -> None:
        injector.on.clear()
        raise KeyboardInterrupt

    injector.on["slice"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        bench.near.run([bench.read(0, 0, 10)], deadline_s=PATIENCE_S)
    (lane,) = lanes_of(bench)
    assert not lane.connected
    assert lane.idle
    assert not bench.local.num_users
    bench.run(write(bench))


def test_an_unexpected_exception_in_a_transport_fails_only_its_batch(
    bench: Pair, injector: FaultInjector, caplog: pytest.LogCaptureFixture
) -> None:
    injector.orders["slice"] = [Outcome.BUG, Outcome.BUG]
    with pytest.raises(PeerLost, match="bug"):
        bench.run(write(bench))
    bench.run(write(bench))
    assert "transfer failed" in caplog.text


def test_a_peer_forgotten_while_connecting_gets_no_slice(bench: Pair, injector: FaultInjector) -> None:
    injector.on["slice"] = lambda: pytest.fail("a slice was sent")
    injector.orders["connect"] = [Outcome.SILENT]
    batch = bench.near.submit([write(bench)], deadline_s=NEVER_S)
    until(lambda: injector.counts["connect", Outcome.SILENT])
    bench.near.forget(bench.far.address)
    with pytest.raises(PeerLost):
        batch.wait(PATIENCE_S)


def test_connections_above_the_cap_close_when_they_become_idle(
    make_pair: MakePair, make_engine: Make, injector: FaultInjector
) -> None:
    bench = make_pair(NBYTES, max_endpoints=1)
    bench.run(write(bench))
    for _ in range(4):
        far = make_engine()
        remote = RemoteSegment(far.address, far.allocate(64, readable=True).segment_id)
        run(bench.near, Transfer(Op.READ, bench.local, 0, remote, 0, 64))
    until(lambda: len(injector.open_sessions) == 1)
    assert len(bench.near._endpoints) == 1


def test_a_busy_lane_is_evicted_when_it_becomes_idle(bench: Pair, injector: FaultInjector) -> None:
    bench.run(write(bench))
    (lane,) = lanes_of(bench)
    injector.on["slice"] = lane.disconnect_when_idle
    bench.run(write(bench), bench.read(8192, 0, 10))
    injector.on.clear()
    until(lambda: not lane.connected)


def test_a_batch_fails_if_no_thread_can_be_started(bench: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError))
        with pytest.raises(PeerLost, match="thread"):
            bench.run(write(bench))
    assert not bench.local.num_users
    bench.run(write(bench))


def fail_and_leave_a_write_behind(bench: Pair, injector: FaultInjector) -> None:
    injector.orders |= {"slice": [Outcome.LATE], "fence": [Outcome.LOST]}
    with pytest.raises(PeerLost):
        bench.run(write(bench))


@pytest.mark.parametrize("inline", [False, True])
def test_a_retried_write_fences_its_first_copy(bench: Pair, injector: FaultInjector, inline: bool) -> None:
    bench.run(write(bench))
    injector.orders["slice"] = [Outcome.LATE]
    (bench.run_inline if inline else bench.run)(write(bench))
    assert injector.counts["fence", Outcome.ARRIVES] == 1
    bench.memory.buffer[:4096] = b"t" * 4096  # the owner reuses the memory
    assert injector.store_late_data() == 0
    assert bench.memory.buffer[:4096] == b"t" * 4096


def test_an_unfenced_connection_stores_late(bench: Pair, injector: FaultInjector) -> None:
    """Without a fence the late WRITE is stored. This shows that in the other tests the fence alone prevents it."""
    fail_and_leave_a_write_behind(bench, injector)
    assert injector.store_late_data() == 1
    assert bench.memory.buffer[:4096] == bench.local.buffer[:4096]


def test_a_failing_fence_fails_its_parts_after_limited_number_of_attempts(bench: Pair, injector: FaultInjector) -> None:
    injector.orders["slice"] = [Outcome.LOST]
    injector.orders["fence"] = [Outcome.LOST] * 1000
    with pytest.raises(PeerLost, match="fence"):
        bench.run(write(bench), deadline_s=NEVER_S)
    assert len(injector.orders["fence"]) > 990


@pytest.mark.parametrize("is_met_again", [False, True])
def test_a_later_write_fences_the_connection_of_an_earlier_failed_batch(
    bench: Pair, injector: FaultInjector, is_met_again: bool
) -> None:
    fail_and_leave_a_write_behind(bench, injector)
    before = bytes(bench.memory.buffer)
    if is_met_again:
        bench.near.forget(bench.far.address)
    bench.local.buffer[:] = b"o" * bench.local.nbytes
    bench.run(write(bench))
    assert injector.store_late_data() == 0
    assert bench.memory.buffer == b"o" * 4096 + before[4096:]
    num_fences = injector.counts["fence", Outcome.ARRIVES]
    assert num_fences >= 1
    bench.run(write(bench))
    assert injector.counts["fence", Outcome.ARRIVES] == num_fences  # one fence is enough


def test_a_later_write_fences_one_whose_retry_found_no_thread(
    make_pair: MakePair, injector: FaultInjector, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_pair(NBYTES, rails=RAILS)
    bench.run(bench.read(0, 0, 10))  # creates one lane and no second one
    injector.orders["slice"] = [Outcome.LATE]
    with monkeypatch.context() as exhausted:
        exhausted.setattr("moonserve.transfer.paths.failover.Lane", Mock(side_effect=RuntimeError))
        with pytest.raises(PeerLost):
            bench.run(write(bench))
    bench.run(write(bench))
    assert injector.counts["fence", Outcome.ARRIVES] == 1
    assert injector.store_late_data() == 0


def test_a_late_fence_keeps_the_newer_fences_of_a_retried_write(make_pair: MakePair, injector: FaultInjector) -> None:
    """The WRITE breaks on its first path, gives up a slow fence on the second, and breaks on the third. When that fence
    ends, the WRITE is on its fourth path, and the third still has to be fenced."""
    bench = make_pair(NBYTES, rails=RAILS)
    num_fences, num_connects = itertools.count(1), itertools.count(1)
    fencing: list[Lane] = []
    on_its_fourth_way = threading.Event()

    def lose_patience() -> None:
        if next(num_fences) > 1:
            return
        (lane,) = (lane for lane in lanes_of(bench) if lane._groups)
        fencing.append(lane)
        lane._groups[0].give_up_at = 0.0
        lane.tick()  # a connection calls this while it waits
        assert on_its_fourth_way.wait(PATIENCE_S)

    def let_the_fence_end() -> None:
        if next(num_connects) == 4:
            on_its_fourth_way.set()
            until(lambda: not fencing[0]._session_lock.locked())

    injector.on |= {"fence": lose_patience, "connect": let_the_fence_end}
    injector.orders["slice"] = [Outcome.LATE, Outcome.LATE]
    bench.run(write(bench), deadline_s=NEVER_S)
    assert injector.store_late_data() == 0
