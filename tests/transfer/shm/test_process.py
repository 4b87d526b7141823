"""Memory of another process that cannot be mapped is read while it means something, and never after."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

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
CHILD = f"""
import sys, numpy
memory = numpy.arange({NBYTES} // 8, dtype=numpy.int64)
print(memory.ctypes.data, flush=True)
sys.stdin.read()
"""


class Child:
    """Another process's memory, registered there as by an engine."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = int(self.process.stdout.readline())
        self.other = OtherProcess(self.process.pid)
        self.marker = OwnedMemory(1)

    def borrow(self, base: int | None = None, nbytes: int = NBYTES) -> ProcessMemory:
        marker = PeerMemory(self.marker.fd, 1)
        base = self.address if base is None else base
        return ProcessMemory(self.other, base, nbytes, marker)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    try:
        child.borrow().close()
    except PermissionError:
        pytest.skip("needs process_vm_readv of a child (CAP_SYS_PTRACE, or ptrace_scope 0 or 1)")
    finally:
        yield child
        child.end()
        child.other.close()


def test_rows_arrive_in_their_places_and_are_verified(child: Child) -> None:
    """More of them than one system call takes."""
    count, length = 3000, 256
    order = np.random.default_rng(0).permutation(count)
    rows = np.stack((order * length, np.arange(count) * length, np.full(count, length)), axis=1)
    borrowed, expected = child.borrow(), CONTENT[: count * length].reshape(count, -1)[order]
    for column, order in ((LOCAL, [0, 1, 2]), (REMOTE, [LOCAL, REMOTE, LENGTH])):
        into = np.zeros(count * length, np.uint8)
        turned = np.ascontiguousarray(rows[:, order])
        assert borrowed.copy_verified(address_of(into), turned, to_column=column)
        assert np.array_equal(into.reshape(count, -1), expected)
    borrowed.close()


def test_memory_that_is_not_mapped_there_is_no_memory(child: Child) -> None:
    with pytest.raises(OSError, match="Bad address"):
        child.borrow(nbytes=1 << 46)
    borrowed, into = child.borrow(), np.zeros(NBYTES, np.uint8)
    for rows_before in (0, 1, 1500):
        rows = scatter.rows(*[(0, 0, 8)] * rows_before, (1 << 40, 0, 8))
        with pytest.raises(InvalidRequest, match="EFAULT"):
            borrowed.copy(address_of(into), rows, to_column=LOCAL)
    for base, nbytes in ((0, 10), (-5, 10), (1 << 62, (1 << 62) + 1), (4096, 0)):
        with pytest.raises(PeerLost):
            child.borrow(base, nbytes)


def test_memory_that_was_deregistered_is_no_longer_live(child: Child) -> None:
    borrowed = child.borrow()
    borrowed.require_live()
    child.marker.retire()
    assert not borrowed.live
    with pytest.raises(InvalidRequest):
        borrowed.require_live()
    borrowed.close()


def test_a_process_that_has_ended_is_not_mistaken_for_its_successor(child: Child) -> None:
    borrowed, into = child.borrow(), np.zeros(8, np.uint8)
    child.end()
    with pytest.raises(PeerLost):
        borrowed.copy(address_of(into), scatter.rows((0, 0, 8)), to_column=LOCAL)
    with pytest.raises(ProcessLookupError):
        OtherProcess(child.process.pid)
