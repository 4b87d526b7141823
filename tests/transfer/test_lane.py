"""One lane: whose turn it is, and that every part ends in time whatever the session does."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from protocol.errors import Cancelled, ConfigError, PeerLost
from tests.patience import NEVER_S, PATIENCE_S, until
from tests.transfer.bench import TOKEN, Make, Orders
from tests.transfer.fake_transport import Fate
from transfer import Op, RemoteSegment, Transfer, TransferEngine

NBYTES = 1 << 16


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
    until(lambda: bench.network.counts["connect", Fate.SILENT] == 1 or not looking.is_alive())
    orders.connects.clear()  # on a busy machine its time is over before it connects
    batches = [bench.near.submit([bench.write()], deadline_s=PATIENCE_S) for _ in range(20)]
    for batch in batches:
        batch.wait(PATIENCE_S)
    looking.join()


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
                [Transfer(Op.READ, bench.local, 0, remote, 0, 64)], deadline_s=PATIENCE_S
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
