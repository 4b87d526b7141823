"""What every transport must do, whatever carries the bytes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from protocol.errors import InvalidRequest, StaleLease
from tests.patience import PATIENCE_S
from tests.transfer.conftest import Pair, PeerInProcess
from transfer import Op, RemoteSegment, ScatterTransfer, Transfer, TransferEngine, scatter

SIZES = [1, 7, 4096, 65_536, 1 << 20, 16 << 20]


@pytest.mark.parametrize("size", SIZES)
def test_bytes_arrive_as_they_were_sent_and_come_back(
    make_engine: Callable[..., TransferEngine], size: int
) -> None:
    near, far = make_engine(), make_engine()
    memory = far.allocate(size + 2, readable=True)
    content = random.Random(size).randbytes(size)
    local = near.allocate(2 * size)
    local.buffer[:size] = content
    window_id = far.open_window(memory, [(1, size)])
    remote = RemoteSegment(far.address, memory.segment_id)

    near.submit(
        [Transfer(Op.WRITE, local, 0, remote, 1, size, window_id)], deadline_s=PATIENCE_S
    ).wait(PATIENCE_S)
    near.submit([Transfer(Op.READ, local, size, remote, 1, size)], deadline_s=PATIENCE_S).wait(
        PATIENCE_S
    )

    assert memory.buffer[1 : 1 + size] == content
    assert (memory.buffer[0], memory.buffer[size + 1]) == (0, 0)
    assert local.buffer[size:] == content


@pytest.mark.parametrize("near_registered", [False, True])
@pytest.mark.parametrize("far_registered", [False, True])
def test_memory_that_the_caller_brought_works_on_either_side(
    make_engine: Callable[..., TransferEngine], near_registered: bool, far_registered: bool
) -> None:
    near, far = make_engine(), make_engine()
    local = near.register(bytearray(4096)) if near_registered else near.allocate(4096)
    memory = (
        far.register(bytearray(4096), readable=True)
        if far_registered
        else far.allocate(4096, readable=True)
    )
    local.buffer[:] = random.Random(1).randbytes(4096)
    remote = RemoteSegment(far.address, memory.segment_id)
    window_id = far.open_window(memory, [(0, 4096)])
    write = Transfer(Op.WRITE, local, 0, remote, 2048, 2048, window_id)
    read = Transfer(Op.READ, local, 2048, remote, 2048, 2048)
    near.submit([write], deadline_s=PATIENCE_S).wait(PATIENCE_S)
    near.submit([read], deadline_s=PATIENCE_S).wait(PATIENCE_S)
    assert memory.buffer[2048:] == local.buffer[:2048] == local.buffer[2048:]


def test_a_thousand_small_pieces_land_each_in_its_place(pair: Pair) -> None:
    rng = random.Random(2)
    places = rng.sample(range(2048), 1000)
    pair.local.buffer[:] = rng.randbytes(pair.local.nbytes)
    before = bytes(pair.memory.buffer)
    lengths = [rng.randint(0, 512) for _ in places]
    pair.run(*(pair.write(i * 512, place * 512, lengths[i]) for i, place in enumerate(places)))
    expected = bytearray(before)
    for i, place in enumerate(places):
        piece = pair.local.buffer[i * 512 : i * 512 + lengths[i]]
        expected[place * 512 : place * 512 + lengths[i]] = piece
    assert pair.memory.buffer == expected

    pair.local.buffer[:] = bytes(pair.local.nbytes)
    pair.run(*(pair.read(i * 512, place * 512, 512) for i, place in enumerate(places)))
    for i, place in enumerate(places):
        assert pair.local.buffer[i * 512 :][:512] == expected[place * 512 :][:512]


def test_more_pieces_than_one_frame_holds(pair: Pair) -> None:
    count = 10_000
    pair.run(*(pair.read(i * 100, i * 50, 25) for i in range(count)))
    for i in (0, 4095, 4096, count - 1):
        assert pair.local.buffer[i * 100 :][:25] == pair.memory.buffer[i * 50 :][:25]


def test_a_batch_may_read_and_write_and_go_to_several_peers(
    pair: Pair, make_engine: Callable[..., TransferEngine]
) -> None:
    other = make_engine()
    memory = other.allocate(4096, readable=True)
    memory.buffer[:] = b"o" * 4096
    pair.local.buffer[:10] = b"0123456789"
    elsewhere = RemoteSegment(other.address, memory.segment_id)
    pair.run(
        pair.write(0, 500, 10),
        Transfer(Op.READ, pair.local, 8192, elsewhere, 0, 4096),
        pair.read(100, 0, 50),
    )
    assert pair.memory.buffer[500:510] == b"0123456789"
    assert pair.local.buffer[8192 : 8192 + 4096] == memory.buffer
    assert pair.local.buffer[100:150] == pair.memory.buffer[:50]


def test_an_engine_can_be_its_own_peer(pair: Pair) -> None:
    own = pair.near.allocate(100, readable=True)
    own.buffer[:] = b"x" * 100
    remote = RemoteSegment(pair.near.address, own.segment_id)
    pair.run(Transfer(Op.READ, pair.local, 0, remote, 0, 100))
    assert pair.local.buffer[:100] == b"x" * 100


def test_batches_of_many_threads_do_not_disturb_each_other(pair: Pair) -> None:
    size, failures = 8192, []
    pair.local.buffer[:] = random.Random(3).randbytes(pair.local.nbytes)

    def work(lane: int) -> None:
        start = lane * 2 * size
        for _ in range(20):
            pair.run(pair.write(start, start, size))
            pair.run(pair.read(start + size, start, size))
            if pair.local.buffer[start : start + size] != pair.memory.buffer[start:][:size]:
                failures.append(lane)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(
        pair.local.buffer[s : s + size] == pair.local.buffer[s + size :][:size]
        for s in range(0, 16 * size, 2 * size)
    )


def test_nothing_to_do_is_done_at_once(pair: Pair) -> None:
    batch = pair.near.submit([], deadline_s=1)
    assert batch.done
    batch.wait(0)
    pair.run(pair.read(0, 0, 0), pair.write(0, 0, 0))


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 101), (99, 2), (150, 60), (250, 10), (300, 101), (1 << 40, 1)]
)
def test_a_write_outside_the_window_is_refused_and_stores_nothing(
    pair: Pair, offset: int, length: int
) -> None:
    window_id = pair.far.open_window(pair.memory, [(300, 50), (0, 100), (200, 50), (350, 50)])
    before = bytes(pair.memory.buffer)
    with pytest.raises(InvalidRequest):
        pair.run(pair.write(0, 0, 10, window_id), pair.write(20, offset, length, window_id))
    assert pair.memory.buffer == before
    pair.run(pair.write(0, 300, 100, window_id), pair.write(0, 200, 50, window_id))


def test_a_write_through_a_closed_window_is_stale(pair: Pair) -> None:
    before = bytes(pair.memory.buffer)
    pair.far.close_window(pair.window_id)
    with pytest.raises(StaleLease):
        pair.run(pair.write(0, 0, 300_000))
    assert pair.memory.buffer == before
    pair.run(pair.read(0, 0, 100))  # the session is as good as before


def test_a_window_that_never_was_or_is_elsewhere_is_refused(pair: Pair) -> None:
    other = pair.far.allocate(4096)
    elsewhere = pair.far.open_window(other, [(0, 4096)])
    for transfer in (pair.write(0, 0, 10, 12345), pair.write(0, 0, 10, elsewhere)):
        with pytest.raises(InvalidRequest):
            pair.run(transfer)
    with pytest.raises(InvalidRequest):
        pair.run(replace(pair.write(0, 0, 10), window_id=None))


def test_only_readable_segments_can_be_read_and_only_within_bounds(pair: Pair) -> None:
    secret = pair.far.allocate(4096)
    hidden = replace(pair.read(0, 0, 10), remote=RemoteSegment(pair.far.address, 2))
    assert secret.segment_id == 2
    beyond = (pair.read(0, pair.memory.nbytes - 5, 6), pair.read(0, 1 << 61, 1))
    unknown = replace(hidden, remote=RemoteSegment(pair.far.address, 999))
    for transfer in (hidden, unknown, *beyond):
        with pytest.raises(InvalidRequest):
            pair.run(transfer)
    pair.run(pair.read(0, pair.memory.nbytes - 5, 5))


def test_each_transfer_of_a_batch_has_its_own_error(pair: Pair) -> None:
    closed = pair.far.open_window(pair.memory, [(0, 100)])
    pair.far.close_window(closed)
    outside_local = pair.read(pair.local.nbytes, 0, 1)
    negative = pair.read(-1, 0, 1)
    transfers = [pair.write(0, 0, 9), pair.write(0, 0, 9, closed), outside_local, negative]
    batch = pair.near.submit([*transfers, pair.read(0, 0, 9)], deadline_s=PATIENCE_S)
    with pytest.raises(StaleLease):
        batch.wait(PATIENCE_S)
    kinds = [type(error) for error in batch.errors]
    assert kinds == [type(None), StaleLease, InvalidRequest, InvalidRequest, type(None)]


def test_a_scatter_list_without_rows_or_bytes_is_done_at_once(pair: Pair) -> None:
    for rows in (scatter.rows(), scatter.rows((0, 0, 0), (10, 10, 0))):
        for op, window_id in ((Op.READ, None), (Op.WRITE, pair.window_id)):
            transfer = ScatterTransfer(op, pair.local, pair.remote, rows, window_id)
            pair.near.submit([transfer], deadline_s=PATIENCE_S).wait(PATIENCE_S)


def test_two_processes_read_and_write_each_other(
    make_engine: Callable[..., TransferEngine], peer: PeerInProcess
) -> None:
    engine = make_engine()
    address = peer.ask("address")
    segment_id = peer.ask("allocate", 1 << 20, 7, True)
    window_id = peer.ask("open_window", segment_id, [(4096, 4096)])
    local = engine.allocate(1 << 20)
    remote = RemoteSegment(address, segment_id)
    engine.submit([Transfer(Op.READ, local, 0, remote, 0, 1 << 20)], deadline_s=PATIENCE_S).wait(
        PATIENCE_S
    )
    assert local.buffer == b"\7" * (1 << 20)
    local.buffer[:4096] = b"w" * 4096
    write = Transfer(Op.WRITE, local, 0, remote, 4096, 4096, window_id)
    engine.submit([write], deadline_s=PATIENCE_S).wait(PATIENCE_S)
    content = bytes.fromhex(peer.ask("content", segment_id))
    assert content[4096:8192] == b"w" * 4096
    assert content[:4096] == b"\7" * 4096
