"""Native exchanges: that READs and WRITEs over TCP take them, and what they do when memory is taken away."""

import gc
import weakref

import numpy as np
import pytest

from moonserve.protocol.errors import InvalidRequest, StaleLease
from moonserve.transfer import Op, RemoteSegment, ScatterTransfer, Transfer
from moonserve.transfer.tcp.target import StreamTarget
from tests.patience import until
from tests.transfer.conftest import Make, MakePair, Pair

TRANSPORTS = ["tcp"]
NBYTES = 1 << 20


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def served(make_pair: MakePair, request: pytest.FixtureRequest) -> Pair:
    """A pair whose first READ and WRITE were served, natively."""
    pair = make_pair(NBYTES, checksums=request.param)
    pair.run_inline(pair.read(0, 0, 4096))
    pair.run_inline(pair.write(0, 0, 4096))
    return pair


@pytest.mark.parametrize("inline", [False, True])
def test_reads_and_writes_of_many_rows_are_served_natively(
    served: Pair, monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    monkeypatch.setattr(StreamTarget, "dispatch", None)
    draw = np.random.default_rng(5)
    run = served.run_inline if inline else served.run
    for num_rows in (1, 3, 8, 9, 2000, 4096):
        length = NBYTES // 4096 - 1
        places = [draw.permutation(4096)[:num_rows] * (length + 1) for _ in range(2)]
        rows = np.stack((*places, np.full(num_rows, length)), axis=1)
        served.memory.buffer[:] = draw.bytes(NBYTES)
        run(ScatterTransfer(Op.READ, served.local, served.remote, rows))
        mine, theirs = (np.frombuffer(each.buffer, np.uint8) for each in (served.local, served.memory))
        for remote, local, nbytes in rows:
            assert np.array_equal(mine[local : local + nbytes], theirs[remote : remote + nbytes])
        served.local.buffer[:] = draw.bytes(NBYTES)
        before = theirs.copy()
        run(ScatterTransfer(Op.WRITE, served.local, served.remote, rows, served.window_id))
        for remote, local, nbytes in rows:
            before[remote : remote + nbytes] = mine[local : local + nbytes]
        assert np.array_equal(theirs, before)


def test_what_was_taken_away_is_refused_and_the_connection_serves_on(served: Pair) -> None:
    served.far.close_window(served.window_id)
    with pytest.raises(StaleLease):
        served.run_inline(served.write(0, 0, 4096))
    with pytest.raises(InvalidRequest, match="never opened"):
        served.run_inline(Transfer(Op.WRITE, served.local, 0, served.remote, 0, 4096, window_id=0))
    served.run_inline(served.read(0, 0, 4096))
    served.far.deregister(served.memory)
    with pytest.raises(InvalidRequest, match="not registered"):
        served.run_inline(served.read(0, 0, 4096))
    again = served.far.allocate(4096, readable=True)
    again.buffer[:] = b"a" * 4096
    remote = RemoteSegment(served.far.address, again.segment_id)
    served.run_inline(Transfer(Op.READ, served.local, 0, remote, 0, 4096))
    assert served.local.buffer[:4096] == again.buffer
    assert sum(1 for path in served.near.stats if path.incidents["breaks"]) == 0


@pytest.mark.parametrize("start", [NBYTES - 100, NBYTES, -1])
def test_bytes_outside_of_what_is_served_are_refused(served: Pair, start: int) -> None:
    rows = np.array([(0, 0, 300), (start, 300, 300)])
    for op, window_id in ((Op.READ, None), (Op.WRITE, served.window_id)):
        with pytest.raises(InvalidRequest):
            served.run_inline(ScatterTransfer(op, served.local, served.remote, rows, window_id))
    served.run_inline(served.read(0, 0, 4096))


def test_memory_that_was_served_is_freed(make_engine: Make) -> None:
    near, far = make_engine(), make_engine()
    array = np.zeros(NBYTES, np.uint8)
    segment, local = far.register(array, readable=True), near.allocate(NBYTES)
    near.run((Transfer(Op.READ, local, 0, RemoteSegment(far.address, segment.segment_id), 0, NBYTES),), deadline_s=9)
    far.deregister(segment)
    freed = weakref.ref(array)
    del array, segment
    until(lambda: gc.collect() >= 0 and freed() is None)
