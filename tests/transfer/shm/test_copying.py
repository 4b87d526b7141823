"""Copies are whole, verified where asked, guarded step by step, and shared among threads."""

from __future__ import annotations

import random
import threading

import pytest

from protocol.errors import InvalidRequest, StaleLease
from transfer import scatter
from transfer.scatter import LOCAL, REMOTE
from transfer.segments import Segment, SegmentTable
from transfer.shm.copying import STEP_BYTES, Copier
from transfer.shm.memfd import PeerMemory

NBYTES = 20 << 20


class Guard:
    """Counts how often it was entered; refuses from the `limit`-th time on."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self.entered = 0
        self.inside = 0

    def __enter__(self) -> None:
        if self.entered >= self.limit:
            raise StaleLease("closed")
        self.entered += 1
        self.inside += 1

    def __exit__(self, *_: object) -> None:
        self.inside -= 1


class Segments:
    def __init__(self) -> None:
        table = SegmentTable()
        self.into: Segment = table.allocate(NBYTES, readable=False)
        self.owned: Segment = table.allocate(NBYTES, readable=True)
        self.owned.buffer[:] = random.Random(0).randbytes(NBYTES)
        assert self.owned.memory is not None
        self.source = PeerMemory(self.owned.memory.fd, NBYTES)


@pytest.fixture(scope="module")
def segments() -> Segments:
    return Segments()


@pytest.fixture(autouse=True)
def empty(segments: Segments) -> None:
    segments.into.buffer[:] = bytes(NBYTES)


@pytest.mark.parametrize("threads", [1, 2])
def test_every_step_is_guarded_and_none_comes_after_a_refusal(segments: Segments, threads: int) -> None:
    rows, guard, copier = scatter.rows((0, 0, NBYTES)), Guard(limit=3), Copier(threads)
    with pytest.raises(StaleLease):
        copier.copy(segments.source, segments.into, rows, to_column=REMOTE, verified=True, guard=guard)
    copier.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("transfer-copy")]
    assert guard.inside == 0
    stored = sum(any(segments.into.buffer[at : at + STEP_BYTES]) for at in range(0, NBYTES, STEP_BYTES))
    assert stored == 3


def test_a_source_that_was_deregistered_meanwhile_does_not_count() -> None:
    other = Segments()
    assert other.owned.memory is not None
    other.owned.memory.retire()
    rows = scatter.rows((0, 0, 100))
    with pytest.raises(InvalidRequest):
        Copier(1).copy(other.source, other.into, rows, to_column=LOCAL, verified=True)


def test_a_copy_that_is_given_no_thread_is_made_by_its_own_and_never_again(
    segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    copier, whole = Copier(3), scatter.rows((0, 0, NBYTES))
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", refuse)
        copier.copy(segments.source, segments.into, whole, to_column=LOCAL, verified=True)
    assert segments.into.buffer == segments.owned.buffer
    segments.into.buffer[:] = bytes(NBYTES)
    half = scatter.rows((0, 0, NBYTES // 2))  # the pool still has what it could not begin
    copier.copy(segments.source, segments.into, half, to_column=LOCAL, verified=True)
    copier.close()
    assert segments.into.buffer[NBYTES // 2 :] == bytes(NBYTES - NBYTES // 2)
