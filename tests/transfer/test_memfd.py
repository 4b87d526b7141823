"""Memory that is lent out can be read by others and harmed by nobody."""

from __future__ import annotations

import mmap
import os

import pytest

from protocol.errors import InvalidRequest, PeerLost
from transfer.memfd import OwnedMemory, PeerMemory


def test_a_borrower_sees_the_owners_stores_and_can_neither_write_nor_shrink() -> None:
    owned = OwnedMemory(5000)
    borrowed = PeerMemory(owned.fd, 5000)
    owned.view[4999] = 42
    assert borrowed.view[4999] == 42
    assert borrowed.view.readonly
    with pytest.raises(PermissionError):
        mmap.mmap(owned.fd, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(owned.fd, 0)
    with pytest.raises(PermissionError):
        os.pwrite(owned.fd, b"x", 0)
    borrowed.close()
    owned.retire()


def test_a_retired_segment_is_known_as_such_to_who_still_maps_it() -> None:
    owned = OwnedMemory(4096)
    borrowed = PeerMemory(owned.fd, 4096)
    borrowed.require_live()
    owned.retire()
    assert not borrowed.live
    with pytest.raises(InvalidRequest):
        borrowed.require_live()
    borrowed.close()


def test_memory_that_its_owner_could_shrink_is_not_accepted() -> None:
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    with pytest.raises(PeerLost):
        PeerMemory(fd, 4096)
    os.close(fd)


@pytest.mark.parametrize("claimed", [0, 4097, 1 << 40])
def test_a_size_that_is_not_the_files_is_not_accepted(claimed: int) -> None:
    owned = OwnedMemory(4096)
    with pytest.raises(PeerLost):
        PeerMemory(owned.fd, claimed)
    owned.retire()
