"""One lane: batches take turns, every part ends in time whatever the session does, and a WRITE that may still arrive is
fenced before its memory is used again."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from protocol.errors import Cancelled, PeerLost
from tests.patience import NEVER_S, PATIENCE_S, until
from tests.transfer.conftest import RAILS, Make, MakePair, Pair, run
from tests.transfer.fates import Fate, Fates
from transfer import Op, RemoteSegment, Transfer
from transfer.lane import Lane
from transfer.stats import Incident

TRANSPORTS = ["tcp"]
pytestmark = pytest.mark.usefixtures("fates")  # must be set up before the engines
NBYTES = 1 << 16


@pytest.fixture
def bench(make_pair: MakePair) -> Pair:
    return make_pair(NBYTES)


def write(bench: Pair, at: int = 0) -> Transfer:
    return bench.write(at, at, 4096)


def lanes_of(bench: Pair) -> list[Lane]:
    (peer,) = bench.near._peers.met.values()
    return list(peer._lanes.values())


def test_batches_keep_their_deadlines_while_a_caller_has_the_session(bench: Pair, fates: Fates) -> None:
    bench.run(write(bench))
    fates.orders["list"] = [Fate.SILENT]
    threads = ThreadPoolExecutor(1)
    looking = threads.submit(bench.near.open, bench.far.address, deadline_s=NEVER_S)
    (lane,) = lanes_of(bench)
    until(lane._turn.locked)
    batches = [bench.near.submit([write(bench)], deadline_s=0.1) for _ in range(3)]
    cancelled = bench.near.submit([write(bench)], deadline_s=NEVER_S)
    cancelled.cancel()
    for batch in batches:
        with pytest.raises(PeerLost):
            batch.wait(PATIENCE_S)
    with pytest.raises(Cancelled):
        cancelled.wait(PATIENCE_S)
    assert lane._turn.locked()
    bench.near.forget(bench.far.address)
    with threads, pytest.raises(PeerLost):
        looking.result()
    bench.run(write(bench))


def test_a_batch_that_waits_for_a_connection_fails_alone(bench: Pair, fates: Fates) -> None:
    """A batch with a later deadline, or one submitted while a caller connects, is carried afterwards."""
    for give_up in (
        lambda: bench.near.submit([write(bench)], deadline_s=0.3).wait(PATIENCE_S),
        lambda: bench.near.open(bench.far.address, deadline_s=0.3),
    ):
        fates.orders["connect"] = [Fate.SILENT]
        fates.counts.clear()
        with ThreadPoolExecutor(1) as threads:
            failing = threads.submit(give_up)
            until(lambda: fates.counts["connect", Fate.SILENT] or failing.done())  # noqa: B023
            fates.orders["connect"].clear()  # on a busy machine the deadline may pass before the attempt
            batches = [bench.near.submit([write(bench)], deadline_s=PATIENCE_S) for _ in range(10)]
            for batch in batches:
                batch.wait(PATIENCE_S)
            with pytest.raises(PeerLost):
                failing.result()
        bench.near.forget(bench.far.address)


def test_a_rail_that_does_not_connect_is_left_for_another_long_before_the_deadline(
    make_pair: MakePair, fates: Fates, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_pair(NBYTES, rails=RAILS)
    with monkeypatch.context() as patched:
        patched.setattr("transfer.waiting._CONNECT_S", 0.1)
        fates.orders["connect"] = [Fate.SILENT]
        fates.on["connect"] = patched.undo  # the other rail gets the normal timeout
        bench.run(write(bench), deadline_s=NEVER_S)
    assert fates.connect_s[0] <= 0.1


def test_a_short_batch_behind_a_silent_long_one_takes_another_rail(make_pair: MakePair, fates: Fates) -> None:
    bench = make_pair(NBYTES, rails=RAILS)
    fates.orders["slice"] = [Fate.SILENT]
    long = bench.near.submit([write(bench)], deadline_s=NEVER_S)
    until(lambda: fates.counts["slice", Fate.SILENT])
    (stuck,) = (lane for lane in lanes_of(bench) if lane._jobs)
    for _ in range(8):
        bench.run(write(bench, 8192))
    assert stuck._jobs
    assert not long.done
    bench.near.forget(bench.far.address)
    with pytest.raises(PeerLost):
        long.wait(PATIENCE_S)


def test_a_cancelled_batch_is_begun_no_more_and_what_is_under_way_ends_first(bench: Pair, fates: Fates) -> None:
    bench.run(write(bench))
    under_way, go_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        under_way.set()
        assert go_on.wait(PATIENCE_S)

    fates.on["slice"] = stand_still
    first = bench.near.submit([write(bench)], deadline_s=NEVER_S)
    assert under_way.wait(PATIENCE_S)
    fates.on.clear()
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


def test_an_interrupted_caller_leaves_no_half_used_session(bench: Pair, fates: Fates) -> None:
    bench.run(write(bench))

    def interrupt() -> None:
        fates.on.clear()
        raise KeyboardInterrupt

    fates.on["slice"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        bench.near.run([bench.read(0, 0, 10)], deadline_s=PATIENCE_S)
    (lane,) = lanes_of(bench)
    assert not lane.connected
    assert lane.idle
    assert not bench.local.num_users
    bench.run(write(bench))


def test_a_bug_of_the_transport_ends_the_batch_and_nothing_else(
    bench: Pair, fates: Fates, caplog: pytest.LogCaptureFixture
) -> None:
    fates.orders["slice"] = [Fate.BUG, Fate.BUG]
    with pytest.raises(PeerLost, match="bug"):
        bench.run(write(bench))
    bench.run(write(bench))
    assert "transfer failed" in caplog.text


def test_a_peer_that_is_forgotten_while_it_is_dialled_is_not_served_any_more(bench: Pair, fates: Fates) -> None:
    fates.on["slice"] = lambda: pytest.fail("a slice was sent")
    fates.orders["connect"] = [Fate.SILENT]
    batch = bench.near.submit([write(bench)], deadline_s=NEVER_S)
    until(lambda: fates.counts["connect", Fate.SILENT])
    bench.near.forget(bench.far.address)
    with pytest.raises(PeerLost):
        batch.wait(PATIENCE_S)


def test_connections_beyond_the_cap_go_when_they_fall_idle(
    make_pair: MakePair, make_engine: Make, fates: Fates
) -> None:
    bench = make_pair(NBYTES, max_endpoints=1)
    bench.run(write(bench))
    for _ in range(4):
        far = make_engine()
        remote = RemoteSegment(far.address, far.allocate(64, readable=True).segment_id)
        run(bench.near, Transfer(Op.READ, bench.local, 0, remote, 0, 64))
    until(lambda: len(fates.open_sessions) == 1)
    assert len(bench.near._endpoints) == 1


def test_an_eviction_that_meets_a_busy_lane_is_heeded_when_it_falls_idle(bench: Pair, fates: Fates) -> None:
    bench.run(write(bench))
    (lane,) = lanes_of(bench)
    fates.on["slice"] = lane.disconnect_when_idle
    bench.run(write(bench), bench.read(8192, 0, 10))
    fates.on.clear()
    until(lambda: not lane.connected)


def test_no_thread_to_be_had_is_an_error_of_the_batch(bench: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(PeerLost, match="thread"):
            bench.run(write(bench))
    assert not bench.local.num_users
    bench.run(write(bench))


# Fences


def fail_and_leave_a_write_behind(bench: Pair, fates: Fates) -> None:
    fates.orders |= {"slice": [Fate.LATE], "fence": [Fate.LOST]}
    with pytest.raises(PeerLost):
        bench.run(write(bench))


def test_a_retried_write_fences_its_first_copy(bench: Pair, fates: Fates) -> None:
    fates.orders["slice"] = [Fate.LATE]
    bench.run(write(bench))
    bench.memory.buffer[:4096] = b"t" * 4096  # the owner reuses the memory
    assert fates.store_what_is_late() == 0
    assert bench.memory.buffer[:4096] == b"t" * 4096


def test_what_an_unfenced_connection_left_behind_is_stored_late(bench: Pair, fates: Fates) -> None:
    """Without a fence the late WRITE is stored. This shows that in the other tests the fence alone prevents it."""
    fail_and_leave_a_write_behind(bench, fates)
    assert fates.store_what_is_late() == 1
    assert bench.memory.buffer[:4096] == bench.local.buffer[:4096]


def test_a_fence_that_fails_fails_its_parts_and_does_not_try_for_ever(bench: Pair, fates: Fates) -> None:
    fates.orders["slice"] = [Fate.LOST]
    fates.orders["fence"] = [Fate.LOST] * 1000
    with pytest.raises(PeerLost, match="fence"):
        bench.run(write(bench), deadline_s=NEVER_S)
    assert len(fates.orders["fence"]) > 990


@pytest.mark.parametrize("is_met_again", [False, True])
def test_a_later_write_fences_what_an_earlier_batch_left_behind(bench: Pair, fates: Fates, is_met_again: bool) -> None:
    fail_and_leave_a_write_behind(bench, fates)
    before = bytes(bench.memory.buffer)
    if is_met_again:
        bench.near.forget(bench.far.address)
    bench.local.buffer[:] = b"o" * bench.local.nbytes
    bench.run(write(bench))
    assert fates.store_what_is_late() == 0
    assert bench.memory.buffer == b"o" * 4096 + before[4096:]
    num_fences = fates.counts["fence", Fate.ARRIVES]
    assert num_fences >= 1
    bench.run(write(bench))
    assert fates.counts["fence", Fate.ARRIVES] == num_fences  # one fence is enough


def test_a_write_that_no_thread_could_try_again_is_fenced_by_a_later_one(
    make_pair: MakePair, fates: Fates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Lane:
        raise RuntimeError("can't start new thread")

    bench = make_pair(NBYTES, rails=RAILS)
    bench.run(bench.read(0, 0, 10))  # creates one lane and no second one
    fates.orders["slice"] = [Fate.LATE]
    with monkeypatch.context() as exhausted:
        exhausted.setattr("transfer.peer.Lane", refuse)
        with pytest.raises(PeerLost):
            bench.run(write(bench))
    bench.run(write(bench))
    assert fates.counts["fence", Fate.ARRIVES] == 1
    assert fates.store_what_is_late() == 0


def test_a_fence_that_ends_late_takes_nothing_from_a_write_that_has_gone_on(make_pair: MakePair, fates: Fates) -> None:
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
        lane.look_up()  # a connection calls this while it waits
        assert on_its_fourth_way.wait(PATIENCE_S)

    def let_the_fence_end() -> None:
        if next(num_connects) == 4:
            on_its_fourth_way.set()
            until(lambda: not fencing[0]._turn.locked())

    fates.on |= {"fence": lose_patience, "connect": let_the_fence_end}
    fates.orders["slice"] = [Fate.LATE, Fate.LATE]
    bench.run(write(bench), deadline_s=NEVER_S)
    assert fates.store_what_is_late() == 0
