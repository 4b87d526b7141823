"""Memory of another process that cannot be mapped is read while it means something, and never after."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from protocol.errors import InvalidRequest, PeerLost
from transfer import scatter
from transfer.native import address_of
from transfer.native.process_memory import OtherProcess
from transfer.rows import LENGTH, LOCAL, REMOTE
from transfer.shm.memfd import OwnedMemory, PeerMemory
from transfer.shm.process import ProcessMemory

NBYTES = 10_000


class Lent:
    """Registered memory, read by its own process as a peer would."""

    def __init__(self) -> None:
        self.content = bytearray(os.urandom(NBYTES))
        self.marker = OwnedMemory(1)
        self.process = OtherProcess(os.getpid())

    def borrow(self, nbytes: int = NBYTES) -> ProcessMemory:
        marker = PeerMemory(self.marker.fd, 1)
        return ProcessMemory(self.process, address_of(self.content), nbytes, marker)


@pytest.fixture
def lent() -> Iterator[Lent]:
    lent = Lent()
    yield lent
    lent.process.close()


@pytest.mark.parametrize("column", [LOCAL, REMOTE])
def test_rows_arrive_in_their_places_and_are_verified(lent: Lent, column: int) -> None:
    borrowed, into = lent.borrow(), bytearray(NBYTES)
    rows = scatter.rows((9000, 0, 1000), (3, 1000, 5000))
    if column == REMOTE:
        rows = np.ascontiguousarray(rows[:, [LOCAL, REMOTE, LENGTH]])
    assert borrowed.copy_verified(address_of(into), rows, to_column=column)
    assert into[:1000] == lent.content[9000:]
    assert into[1000:6000] == lent.content[3:5003]
    borrowed.close()


def test_memory_that_was_deregistered_is_no_longer_live(lent: Lent) -> None:
    borrowed = lent.borrow()
    borrowed.require_live()
    lent.marker.retire()
    assert not borrowed.live
    with pytest.raises(InvalidRequest):
        borrowed.require_live()
    borrowed.close()


def test_memory_that_is_not_mapped_there_is_no_memory(lent: Lent) -> None:
    with pytest.raises(OSError, match="Bad address"):
        lent.borrow(nbytes=1 << 46)


@pytest.mark.parametrize(
    ("base", "nbytes"), [(0, 10), (-5, 10), (1 << 62, (1 << 62) + 1), (4096, 0)]
)
def test_nonsense_ends_the_connection(lent: Lent, base: int, nbytes: int) -> None:
    with pytest.raises(PeerLost):
        ProcessMemory(lent.process, base, nbytes, PeerMemory(lent.marker.fd, 1))


@pytest.mark.parametrize(
    ("failure", "told"), [(ProcessLookupError(3, ""), PeerLost), (OSError(14, ""), InvalidRequest)]
)
def test_memory_that_can_be_read_no_more_is_an_error_of_ours(
    lent: Lent, failure: OSError, told: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    borrowed = lent.borrow()

    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(lent.process, "read", fail)
    with pytest.raises(told):
        borrowed.copy(0, scatter.rows((0, 0, 1)), to_column=LOCAL)
    borrowed.close()
