"""Contract of all transports, independent of the medium that carries the bytes."""

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moonserve.protocol.errors import InvalidRequest, MoonserveError, PeerLost, StaleLease
from moonserve.transfer import Batch, Op, RemoteSegment, ScatterTransfer, Transfer
from moonserve.transfer.memory import scatter
from tests.patience import PATIENCE_S
from tests.transfer.conftest import ALL, Make, MakePair, Pair

TRANSPORTS = ALL


@pytest.mark.parametrize(
    ("size", "registered"), [(1, False), (1, True), (4097, True), (300_000, False), (9 << 20, False)]
)
def test_bytes_arrive_as_they_were_sent_and_come_back(make_pair: MakePair, size: int, registered: bool) -> None:
    """Bytes arrive unchanged if an engine thread carries them and if the caller's thread does."""
    pair = make_pair(2 * size + 2, registered=registered)
    before = bytes(pair.memory.buffer)
    for run in (pair.run, pair.run_inline):
        pair.local.buffer[:size] = content = random.Random(size).randbytes(size)
        pair.local.buffer[size:] = bytes(size + 2)
        run(pair.write(0, 1, size))
        run(pair.read(size, 1, size))
        assert pair.memory.buffer == before[:1] + content + before[size + 1 :]
        assert pair.local.buffer[size : 2 * size] == content


def test_more_rows_than_one_frame_holds_arrive_in_place(pair: Pair) -> None:
    rng = random.Random(2)
    places = rng.sample(range(8192), 5000)
    rows = [(place * 128, i * 200, rng.randint(0, 128)) for i, place in enumerate(places)]
    pair.local.buffer[:] = rng.randbytes(pair.local.nbytes)
    expected = bytearray(pair.memory.buffer)
    for at, start, length in rows:
        expected[at : at + length] = pair.local.buffer[start : start + length]

    as_one = ScatterTransfer(Op.WRITE, pair.local, pair.remote, np.array(rows), pair.window_id)
    pair.near.submit([as_one], deadline_s=PATIENCE_S).wait(PATIENCE_S)
    assert pair.memory.buffer == expected
    pair.local.buffer[:] = bytes(pair.local.nbytes)
    pair.run(*(pair.read(start, at, length) for at, start, length in rows))
    for at, start, length in rows:
        assert pair.local.buffer[start : start + length] == expected[at : at + length]


def test_a_batch_reads_and_writes_at_several_peers(pair: Pair, make_engine: Make) -> None:
    other = make_engine()
    memory = other.allocate(4096, readable=True)
    memory.buffer[:] = b"o" * 4096
    own = pair.near.allocate(100, readable=True)
    own.buffer[:] = b"x" * 100
    pair.local.buffer[:10] = b"0123456789"
    elsewhere = RemoteSegment(other.address, memory.segment_id)
    itself = RemoteSegment(pair.near.address, own.segment_id)
    pair.run(
        pair.write(0, 500, 10),
        Transfer(Op.READ, pair.local, 8192, elsewhere, 0, 4096),
        Transfer(Op.READ, pair.local, 4096, itself, 0, 100),
        pair.read(100, 0, 50),
    )
    assert pair.memory.buffer[500:510] == b"0123456789"
    assert pair.local.buffer[8192 : 8192 + 4096] == memory.buffer
    assert pair.local.buffer[4096:4196] == own.buffer
    assert pair.local.buffer[100:150] == pair.memory.buffer[:50]


def test_batches_of_many_threads_do_not_disturb_each_other(pair: Pair) -> None:
    size = 8192
    pair.local.buffer[:] = random.Random(3).randbytes(pair.local.nbytes)

    def work(lane: int) -> None:
        start = lane * 2 * size
        own, remote = pair.local.buffer[start : start + 2 * size], pair.memory.buffer[start : start + size]
        for _ in range(10):
            pair.run(pair.write(start, start, size))
            pair.run(pair.read(start + size, start, size))
            assert own[:size] == own[size:] == remote

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))


def test_an_empty_batch_is_done_immediately(pair: Pair) -> None:
    batch = pair.near.submit([], deadline_s=1)
    assert batch.done
    batch.wait(0)
    pair.run(pair.read(0, 0, 0), pair.write(0, 0, 0))
    for rows in (scatter.rows(), scatter.rows((0, 0, 0), (10, 10, 0))):
        for op, window_id in ((Op.READ, None), (Op.WRITE, pair.window_id)):
            transfer = ScatterTransfer(op, pair.local, pair.remote, rows, window_id)
            pair.near.submit([transfer], deadline_s=PATIENCE_S).wait(PATIENCE_S)


def refused_by_the_peer(pair: Pair) -> list[tuple[Transfer, type[MoonserveError]]]:
    """Returns transfers that the peer must refuse. The new window covers [0, 100), [200, 250) and [300, 400)."""
    far, read, write = pair.far, pair.read(0, 0, 10), pair.write(0, 0, 10)
    closed, pair.window_id = (pair.window_id, far.open_window(pair.memory, [(300, 50), (0, 100), (200, 50), (350, 50)]))
    far.close_window(closed)
    secret = far.allocate(4096)
    elsewhere = far.open_window(secret, [(0, 4096)])
    outside = [(0, 101), (99, 2), (150, 60), (250, 10), (300, 101), (1 << 40, 1)]
    hidden, unknown = (RemoteSegment(far.address, each) for each in (secret.segment_id, 999))
    return [
        *((pair.write(0, offset, length), InvalidRequest) for offset, length in outside),
        (write, StaleLease),
        (pair.write(0, 0, 300_000, closed), StaleLease),
        *((replace(write, window_id=each), InvalidRequest) for each in (12345, elsewhere, None)),
        *((replace(read, remote=each), InvalidRequest) for each in (hidden, unknown)),
        (pair.read(0, pair.memory.nbytes - 5, 6), InvalidRequest),
        (pair.read(0, 1 << 61, 1), InvalidRequest),
    ]


def test_a_refused_transfer_leaves_the_session_usable(pair: Pair) -> None:
    before = bytes(pair.memory.buffer)
    for transfer, error in refused_by_the_peer(pair):
        for run in (pair.run, pair.run_inline):
            with pytest.raises(error):
                run(transfer)
        assert pair.memory.buffer == before
    pair.run(pair.read(0, pair.memory.nbytes - 5, 5))
    pair.run(pair.write(0, 300, 100), pair.write(0, 200, 50), pair.write(0, 0, 100))
    assert pair.near.usage().num_endpoints == 1
    assert all(not stats.incidents["breaks"] for stats in pair.near.stats)  # type: ignore[index]


def test_each_transfer_of_a_batch_has_its_own_error(pair: Pair) -> None:
    closed = pair.far.open_window(pair.memory, [(0, 100)])
    pair.far.close_window(closed)
    end = pair.local.nbytes
    rows: list[Any] = [[(0, end - 5, 6)], [(-1, 0, 5)], [[1 << 70, 0, 1]], [["x", "y", "z"]]]
    rows += ["abc", None, np.zeros(3, np.int64), np.zeros((2, 2), np.int64)]
    segments = (RemoteSegment(pair.far.address, segment_id) for segment_id in (-1, 1 << 64))
    wrong: list[Any] = [  # without asking the peer
        pair.read(end, 0, 1),
        pair.read(-1, 0, 1),
        replace(pair.write(0, 0, 10), window_id=-1),
        *(replace(pair.read(0, 0, 10), remote=segment) for segment in segments),
        *(ScatterTransfer(Op.READ, pair.local, pair.remote, each) for each in rows),
    ]
    batch = pair.near.submit(
        [pair.write(0, 0, 9), pair.write(0, 0, 9, closed), *wrong, pair.read(0, 0, 9)], deadline_s=PATIENCE_S
    )
    with pytest.raises(StaleLease):
        batch.wait(PATIENCE_S)
    ok, kinds = type(None), [type(error) for error in batch.errors]
    assert kinds == [ok, StaleLease, *[InvalidRequest] * len(wrong), ok]
    for each in wrong:
        with pytest.raises(InvalidRequest):
            pair.run_inline(each)
    assert not pair.local.num_users


def test_open_lists_the_peers_readable_segments(pair: Pair) -> None:
    named = pair.far.allocate(4096, readable=True, name="kv")
    pair.far.allocate(4096)  # not readable, so it must not be listed
    opened = pair.near.open(pair.far.address)
    infos = {segment.segment_id: segment.info for segment in opened}
    assert set(infos) == {pair.memory.segment_id, named.segment_id}
    info = infos[named.segment_id]
    assert info is not None
    assert (info.name, info.nbytes, info.location) == ("kv", 4096, named.location)
    assert pair.remote in opened
    pair.far.close()
    with pytest.raises(PeerLost):
        pair.near.open(pair.far.address, deadline_s=PATIENCE_S)


def test_callbacks_run_once_and_a_failing_one_does_not_affect_others(pair: Pair) -> None:
    heard: list[Batch] = []
    both = threading.Event()

    def fail(batch: Batch) -> None:
        raise RuntimeError("a bug of the caller's")

    batch = pair.near.submit([pair.read(0, 0, 500_000)], deadline_s=PATIENCE_S)
    with contextlib.suppress(RuntimeError):  # raised to the caller if the batch is already done
        batch.add_done_callback(fail)
    batch.add_done_callback(heard.append)
    batch.add_done_callback(lambda _: both.set())
    assert both.wait(PATIENCE_S)
    batch.wait(PATIENCE_S)
    batch.add_done_callback(heard.append)
    assert heard == [batch, batch]
