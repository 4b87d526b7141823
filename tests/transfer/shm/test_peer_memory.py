"""Lent memory can be read by others and cannot be changed or shrunk by them. Copies of it, and of the memory of another
process, are verified on request, guarded step by step, and shared among threads."""

import errno
import gc
import mmap
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from moonserve.protocol.errors import ConfigError, InvalidRequest, PeerLost, StaleLease
from moonserve.transfer.memory import memfd, scatter
from moonserve.transfer.memory.data_plane import address_of
from moonserve.transfer.memory.memfd import OwnedMemory, PeerMemory
from moonserve.transfer.memory.scatter import LENGTH, LOCAL, REMOTE
from moonserve.transfer.memory.segments import Segment, SegmentTable
from moonserve.transfer.shm.peer_memory import STEP_BYTES, PeerProcess, ProcessMemory, copy_in_steps


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("elastic", [False, True])
def test_a_mapping_shows_the_owners_stores_and_cannot_be_written_or_shrunk(elastic: bool) -> None:
    owned = OwnedMemory(5000, elastic=elastic)
    borrowed = PeerMemory(owned.shared_fd, 5000)
    owned.view[4999] = 42
    assert borrowed.view[4999] == 42
    assert borrowed.view.readonly
    with pytest.raises(PermissionError):
        mmap.mmap(owned.shared_fd, 0)
    for fd in {owned.fd, owned.shared_fd}:
        with pytest.raises(OSError):  # noqa: PT011 - the error differs for a read-only descriptor
            os.ftruncate(fd, 0)
    with pytest.raises(OSError):  # noqa: PT011
        os.pwrite(owned.shared_fd, b"x", 0)
    borrowed.close()


def test_unsealed_memory_or_memory_of_a_wrong_size_is_refused() -> None:
    loose, owned = os.memfd_create("loose", os.MFD_ALLOW_SEALING), OwnedMemory(4096)
    os.ftruncate(loose, 8192)
    with open(os.devnull) as none:
        for fd, claimed in ((loose, 4096), (none.fileno(), 4096), *((owned.fd, n) for n in (0, 4097, 1 << 40))):
            with pytest.raises(PeerLost):
                PeerMemory(fd, claimed)
    os.close(loose)


def test_the_descriptor_stays_open_as_long_as_the_memory_is_referenced() -> None:
    before = open_descriptors()
    owned = OwnedMemory(4096)
    owned.mark_dead()
    assert os.fstat(owned.fd).st_size > 4096
    del owned
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("can_populate", [True, False])
@pytest.mark.parametrize("nbytes", [1, 4096, 5 << 20])
def test_owned_memory_is_resident_and_zero(nbytes: int, can_populate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_populate:
        monkeypatch.setattr(memfd, "_MADV_POPULATE_WRITE", 9999)  # gives EINVAL, as before Linux 5.14
    owned = OwnedMemory(nbytes)
    assert owned.resident_bytes >= nbytes
    assert not np.frombuffer(owned.view, np.uint8).any()
    with pytest.raises(ValueError, match="only elastic"):
        owned.discard(0, 4096)


@pytest.mark.parametrize(("code", "words"), [(errno.EMFILE, "ulimit -n"), (errno.ENOMEM, "cannot provide")])
def test_exhausted_memory_and_exhausted_descriptors_have_their_own_errors(
    code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    before = open_descriptors()
    monkeypatch.setattr(memfd.os, "memfd_create" if code == errno.EMFILE else "ftruncate", refuse)
    with pytest.raises(ConfigError, match=words):
        OwnedMemory(4096)
    assert open_descriptors() == before


def test_elastic_memory_has_only_written_pages_and_discards_them_to_zeros() -> None:
    owned = OwnedMemory(1 << 20, elastic=True)
    borrowed, before = PeerMemory(owned.shared_fd, 1 << 20), owned.resident_bytes
    assert before <= 2 * mmap.PAGESIZE  # the marker's pages
    owned.view[: 1 << 19] = b"x" * (1 << 19)
    owned.populate(1 << 19, 1 << 18)
    assert owned.resident_bytes == before + (1 << 19) + (1 << 18)
    owned.discard(0, 1 << 20)
    assert owned.resident_bytes == before
    assert bytes(borrowed.view[:3]) == b"\0\0\0"
    assert borrowed.live


NBYTES = 20 << 20


class Guard:
    """Counts how often it is entered. Refuses after `limit` times."""

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
        table, memory = SegmentTable(), OwnedMemory(NBYTES)
        self.into: Segment = table.add(memoryview(bytearray(NBYTES)), readable=False)
        self.owned: Segment = table.add(memory.view, readable=True, memory=memory)
        self.owned.buffer[:] = random.Random(0).randbytes(NBYTES)
        self.source = PeerMemory(memory.fd, NBYTES)


def test_every_copy_step_is_guarded_and_none_follows_a_refusal() -> None:
    segments, rows, guard = Segments(), scatter.rows((0, 0, NBYTES)), Guard(limit=3)
    with pytest.raises(StaleLease):
        copy_in_steps(segments.source, segments.into, rows, to_column=REMOTE, verified=True, guard=guard)
    assert guard.inside == 0
    stored = sum(any(segments.into.buffer[at : at + STEP_BYTES]) for at in range(0, NBYTES, STEP_BYTES))
    assert stored == 3


# Memory of another process that cannot be mapped

CONTENT = np.arange(1 << 17, dtype=np.int64).view(np.uint8)
"""Read by the same system call as the memory of another process. test_lost_peers.py has engines in two processes."""
Borrow = Callable[..., ProcessMemory]


@pytest.fixture
def borrow() -> Iterator[Borrow]:
    own, marker = PeerProcess(os.getpid()), OwnedMemory(1)

    def make(base: int = address_of(CONTENT), nbytes: int = len(CONTENT)) -> ProcessMemory:
        return ProcessMemory(own, base, nbytes, PeerMemory(marker.fd, 1))

    yield make
    own.close()


def test_threads_read_at_once(borrow: Borrow) -> None:
    source, rows = borrow(), scatter.rows((0, 0, len(CONTENT)))

    def read(_: int) -> bool:
        into = np.zeros_like(CONTENT)
        source.copy(address_of(into), rows, to_column=LOCAL)
        return np.array_equal(into, CONTENT)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, range(200)))


def test_rows_arrive_in_place_and_are_verified(borrow: Borrow) -> None:
    """Rows are verified and arrive in place even if there are more than one system call takes."""
    count, length = 3000, 256
    order = np.random.default_rng(0).permutation(count)
    rows = np.stack((order * length, np.arange(count) * length, np.full(count, length)), axis=1)
    borrowed, expected = borrow(), CONTENT[: count * length].reshape(count, -1)[order]
    for column, order in ((LOCAL, [0, 1, 2]), (REMOTE, [LOCAL, REMOTE, LENGTH])):
        into = np.zeros(count * length, np.uint8)
        turned = np.ascontiguousarray(rows[:, order])
        assert borrowed.copy_verified(address_of(into), turned, to_column=column)
        assert np.array_equal(into.reshape(count, -1), expected)


def test_unmapped_memory_of_a_process_is_refused(borrow: Borrow) -> None:
    with pytest.raises(OSError, match="Bad address"):
        borrow(nbytes=1 << 46)
    borrowed, into = borrow(), np.zeros(len(CONTENT), np.uint8)
    for rows_before in (0, 1, 1500):
        rows = scatter.rows(*[(0, 0, 8)] * rows_before, (1 << 40, 0, 8))
        with pytest.raises(InvalidRequest, match="EFAULT"):
            borrowed.copy(address_of(into), rows, to_column=LOCAL)
    for base, nbytes in ((0, 10), (-5, 10), (1 << 62, (1 << 62) + 1), (4096, 0)):
        with pytest.raises(PeerLost):
            borrow(base, nbytes)


def test_an_ended_process_is_not_confused_with_one_that_reuses_its_pid(borrow: Borrow) -> None:
    with subprocess.Popen(["sleep", "3600"]) as child:
        other = PeerProcess(child.pid)
        child.kill()
    borrowed, into = borrow(), np.zeros(8, np.uint8)
    borrowed._process = other
    other.pid = os.getpid()  # the number was reused
    with pytest.raises(PeerLost):
        borrowed.copy(address_of(into), scatter.rows((0, 0, 8)), to_column=LOCAL)
    with pytest.raises(ProcessLookupError):
        PeerProcess(child.pid)
    other.close()
