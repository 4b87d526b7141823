"""Memory that is lent out can be read by others and harmed by nobody."""

from __future__ import annotations

import errno
import gc
import mmap
import os

import numpy as np
import pytest

from protocol.errors import ConfigError, PeerLost
from transfer.shm import memfd
from transfer.shm.memfd import OwnedMemory, PeerMemory


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("elastic", [False, True])
def test_a_borrower_sees_the_owners_stores_and_can_neither_write_nor_shrink(elastic: bool) -> None:
    owned = OwnedMemory(5000, elastic=elastic)
    borrowed = PeerMemory(owned.lent_fd, 5000)
    owned.view[4999] = 42
    assert borrowed.view[4999] == 42
    assert borrowed.view.readonly
    with pytest.raises(PermissionError):
        mmap.mmap(owned.lent_fd, 0)
    for fd in {owned.fd, owned.lent_fd}:
        with pytest.raises(OSError):  # noqa: PT011 - of a descriptor for reading it is another one
            os.ftruncate(fd, 0)
    with pytest.raises(OSError):  # noqa: PT011
        os.pwrite(owned.lent_fd, b"x", 0)
    borrowed.close()


def test_memory_that_its_owner_could_shrink_or_of_another_size_is_not_accepted() -> None:
    loose, owned = os.memfd_create("loose", os.MFD_ALLOW_SEALING), OwnedMemory(4096)
    os.ftruncate(loose, 8192)
    with open(os.devnull) as none:
        for fd, claimed in ((loose, 4096), (none.fileno(), 4096), *((owned.fd, n) for n in (0, 4097, 1 << 40))):
            with pytest.raises(PeerLost):
                PeerMemory(fd, claimed)
    os.close(loose)


def test_its_descriptor_lives_as_long_as_anybody_may_still_pass_it_on() -> None:
    before = open_descriptors()
    owned = OwnedMemory(4096)
    owned.retire()
    assert os.fstat(owned.fd).st_size > 4096
    del owned
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("can_populate", [True, False])
@pytest.mark.parametrize("nbytes", [1, 4096, 5 << 20])
def test_all_its_pages_are_there_and_zero(nbytes: int, can_populate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_populate:
        monkeypatch.setattr(memfd, "_MADV_POPULATE_WRITE", 9999)  # EINVAL, as before Linux 5.14
    owned = OwnedMemory(nbytes)
    assert owned.resident_bytes >= nbytes
    assert not np.frombuffer(owned.view, np.uint8).any()
    with pytest.raises(ValueError, match="only elastic"):
        owned.discard(0, 4096)


@pytest.mark.parametrize(("code", "words"), [(errno.EMFILE, "ulimit -n"), (errno.ENOMEM, "cannot be had")])
def test_memory_or_descriptors_that_have_run_out_are_told_apart(
    code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    before = open_descriptors()
    monkeypatch.setattr(memfd.os, "memfd_create" if code == errno.EMFILE else "ftruncate", refuse)
    with pytest.raises(ConfigError, match=words):
        OwnedMemory(4096)
    assert open_descriptors() == before


def test_elastic_memory_has_the_pages_that_were_written_and_gives_them_back_as_zeros() -> None:
    owned = OwnedMemory(1 << 20, elastic=True)
    borrowed, before = PeerMemory(owned.lent_fd, 1 << 20), owned.resident_bytes
    assert before <= 2 * mmap.PAGESIZE  # the marker's
    owned.view[: 1 << 19] = b"x" * (1 << 19)
    owned.populate(1 << 19, 1 << 18)
    assert owned.resident_bytes == before + (1 << 19) + (1 << 18)
    owned.discard(0, 1 << 20)
    assert owned.resident_bytes == before
    assert bytes(borrowed.view[:3]) == b"\0\0\0"
    assert borrowed.live
