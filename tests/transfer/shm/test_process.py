"""Memory of another process that cannot be mapped is read while it means something, and never after."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from protocol.errors import InvalidRequest, PeerLost
from transfer import scatter
from transfer.native import address_of
from transfer.scatter import LENGTH, LOCAL, REMOTE
from transfer.shm.memfd import OwnedMemory, PeerMemory
from transfer.shm.sources import OtherProcess, ProcessMemory

NBYTES = 1 << 20
CONTENT = np.arange(NBYTES // 8, dtype=np.int64).view(np.uint8)
"""Read by the same call as another process's, which engines in two processes do in test_shm.py."""
Borrow = Callable[..., ProcessMemory]


@pytest.fixture
def borrow() -> Iterator[Borrow]:
    own, marker = OtherProcess(os.getpid()), OwnedMemory(1)

    def make(base: int = address_of(CONTENT), nbytes: int = NBYTES) -> ProcessMemory:
        return ProcessMemory(own, base, nbytes, PeerMemory(marker.fd, 1))

    yield make
    own.close()


def test_rows_arrive_in_their_places_and_are_verified(borrow: Borrow) -> None:
    """More of them than one system call takes."""
    count, length = 3000, 256
    order = np.random.default_rng(0).permutation(count)
    rows = np.stack((order * length, np.arange(count) * length, np.full(count, length)), axis=1)
    borrowed, expected = borrow(), CONTENT[: count * length].reshape(count, -1)[order]
    for column, order in ((LOCAL, [0, 1, 2]), (REMOTE, [LOCAL, REMOTE, LENGTH])):
        into = np.zeros(count * length, np.uint8)
        turned = np.ascontiguousarray(rows[:, order])
        assert borrowed.copy_verified(address_of(into), turned, to_column=column)
        assert np.array_equal(into.reshape(count, -1), expected)


def test_memory_that_is_not_mapped_there_is_no_memory(borrow: Borrow) -> None:
    with pytest.raises(OSError, match="Bad address"):
        borrow(nbytes=1 << 46)
    borrowed, into = borrow(), np.zeros(NBYTES, np.uint8)
    for rows_before in (0, 1, 1500):
        rows = scatter.rows(*[(0, 0, 8)] * rows_before, (1 << 40, 0, 8))
        with pytest.raises(InvalidRequest, match="EFAULT"):
            borrowed.copy(address_of(into), rows, to_column=LOCAL)
    for base, nbytes in ((0, 10), (-5, 10), (1 << 62, (1 << 62) + 1), (4096, 0)):
        with pytest.raises(PeerLost):
            borrow(base, nbytes)


def test_a_process_that_has_ended_is_not_mistaken_for_its_successor(borrow: Borrow) -> None:
    with subprocess.Popen(["sleep", "3600"]) as child:
        other = OtherProcess(child.pid)
        child.kill()
    borrowed, into = borrow(), np.zeros(8, np.uint8)
    borrowed._process = other
    other.pid = os.getpid()  # which was given its number
    with pytest.raises(PeerLost):
        borrowed.copy(address_of(into), scatter.rows((0, 0, 8)), to_column=LOCAL)
    with pytest.raises(ProcessLookupError):
        OtherProcess(child.pid)
    other.close()
