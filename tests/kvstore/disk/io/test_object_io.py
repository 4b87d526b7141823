"""Compares the layout of log entries for the ring, made in C, with the one for threads."""

import ctypes
import mmap
from unittest.mock import Mock

from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.kvstore.disk.base import PAGE
from moonserve.kvstore.disk.io.buffers import AlignedScratch, BorrowedMemory, PagePool, RingPages
from moonserve.kvstore.disk.io.format import PageContext, PageKind, extent_pages
from moonserve.kvstore.disk.io.object_io import LogEntry, ObjectIo, pages_from
from tests.kvstore.disk.tiers import written
from tests.thoroughness import examples

FOLDER_ID, SEGMENT = bytes(range(16)), 2**29 - 1
FOLDER = Mock(
    cipher=None,
    context=lambda segment, page: PageContext(FOLDER_ID, segment, page),
    folder_id=FOLDER_ID,
)
FILE = Mock(number=SEGMENT, fileno=lambda: 0)
MEMORY = memoryview(mmap.mmap(-1, 4 * PAGE))
MEMORY[:] = written(1, len(MEMORY)).memory


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3 * PAGE), st.sampled_from([0, 1, PAGE]), st.binary(max_size=PAGE - 60)), max_size=6
    )
)
def test_the_ring_writes_the_same_bytes_as_threads(objects: list[tuple[int, int, bytes]]) -> None:
    """Objects of any length, at the beginning of a page or not, with headers of any length."""
    entries, page = [], 1
    for length, at, encoded in objects:
        entries.append(LogEntry(page, extent_pages(length), PageKind.OBJECT, encoded, MEMORY[at : at + length]))
        page += extent_pages(length)
    entries += LogEntry(page, 1, PageKind.TOMBSTONES, b"t" * 28), LogEntry(page + 1, 1, PageKind.END)
    io = ObjectIo(FOLDER, AlignedScratch())
    pool = PagePool()
    run = io.lay_out(FILE, entries, RingPages(pool))
    numbers = run.vectors[: 2 * run.num_vectors]
    laid_out = b"".join(map(ctypes.string_at, numbers[::2], numbers[1::2]))
    with BorrowedMemory(AlignedScratch(), len(laid_out)) as scratch:
        assert laid_out == b"".join(io.encode_run(SEGMENT, entries, pages_from(scratch)))
    assert run.nbytes == len(laid_out) == (page + 1) * PAGE
