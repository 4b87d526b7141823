"""A write that may still arrive is fenced before its memory is used for anything else."""

from __future__ import annotations

import itertools
import threading

import pytest

from protocol.errors import PeerLost
from tests.patience import NEVER_S, PATIENCE_S, until
from tests.transfer.bench import NBYTES, Bench, Make, Orders
from tests.transfer.fake_transport import Fate
from transfer.lane import Lane


def leave_one_behind(bench: Bench, orders: Orders) -> None:
    """A batch that failed, and whose write may still arrive."""
    orders.slices = [Fate.LATE, Fate.LOST]
    with pytest.raises(PeerLost):
        bench.near.run([bench.write()], deadline_s=PATIENCE_S)


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
    leave_one_behind(bench, orders)
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
    leave_one_behind(bench, orders)
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
