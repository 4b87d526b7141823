"""Another process's memory is read as it is, or an error says why not."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from transfer.native import address_of
from transfer.native.process_memory import OtherProcess
from transfer.rows import LOCAL, Rows

NBYTES = 1 << 20
CHILD = f"""
import sys, numpy
memory = numpy.arange({NBYTES} // 8, dtype=numpy.int64)
print(memory.ctypes.data, flush=True)
sys.stdin.read()
"""


class Child:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = int(self.process.stdout.readline())
        self.other = OtherProcess(self.process.pid)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    probe = np.zeros(8, np.uint8)
    try:
        child.other.read(address_of(probe), child.address, one_row(0, 0, 8), to_column=LOCAL)
    except PermissionError:
        pytest.skip("needs process_vm_readv of a child (CAP_SYS_PTRACE, or ptrace_scope 0 or 1)")
    finally:
        yield child
        child.end()
        child.other.close()


def one_row(remote: int, local: int, length: int) -> Rows:
    return np.array([[remote, local, length]], np.int64)


def test_rows_of_another_process_arrive_each_in_its_place(child: Child) -> None:
    count, length = 3000, 256
    order = np.random.default_rng(0).permutation(count)
    rows = np.stack((order * length, np.arange(count) * length, np.full(count, length)), axis=1)
    into = np.zeros(count * length // 8, np.int64)
    child.other.read(address_of(into), child.address, rows, to_column=LOCAL)
    expected = np.arange(NBYTES // 8)[: count * length // 8].reshape(count, -1)[order]
    assert np.array_equal(into.reshape(count, -1), expected)


@pytest.mark.parametrize("rows_before", [0, 1, 1500])
def test_memory_that_is_not_mapped_is_an_error(child: Child, rows_before: int) -> None:
    into = np.zeros(NBYTES, np.uint8)
    rows = np.concatenate(
        (np.repeat(one_row(0, 0, 8), rows_before, axis=0), one_row(1 << 40, 0, 8))
    )
    with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
        child.other.read(address_of(into), child.address, rows, to_column=LOCAL)


def test_a_process_that_has_ended_is_not_mistaken_for_its_successor(child: Child) -> None:
    child.end()
    into = np.zeros(8, np.uint8)
    with pytest.raises(ProcessLookupError):
        child.other.read(address_of(into), child.address, one_row(0, 0, 8), to_column=LOCAL)
    with pytest.raises(ProcessLookupError):
        OtherProcess(child.process.pid)
