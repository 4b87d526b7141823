"""Compares reads and writes through io_uring with the same through system calls, over real files."""

import asyncio
import contextlib
import dataclasses
import errno
import mmap
import os
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.kvstore.disk.base import PAGE, DiskWrite
from moonserve.kvstore.disk.health import DiskOperation, HangTracker
from moonserve.kvstore.disk.io import uring as rings
from moonserve.kvstore.disk.io.buffers import MAX_PAGES, OutOfPages
from moonserve.kvstore.disk.io.object_io import ObjectIo
from moonserve.kvstore.disk.io.uring import MAX_VECTORS, NUM_SLOTS, Flight, IoRun, Ring
from tests.kvstore.disk.tiers import NO_RING, SMALL, opened, written
from tests.thoroughness import examples

FILE_PAGES = 96
LONG_PAGES = rings.IN_LOOP_BYTES // PAGE + 1
"""Length of a run that a kernel thread starts instead of the event loop."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = tmp_path_factory.mktemp("ring") / "file"
    path.write_bytes(random.Random(0).randbytes(FILE_PAGES * PAGE))
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


@contextlib.asynccontextmanager
async def opened_ring() -> AsyncIterator[Ring]:
    ring = Ring.opened(HangTracker())
    if ring is None:
        pytest.skip(NO_RING)
    try:
        yield ring
        ring.validate()
    finally:
        ring.close()


@pytest.fixture
async def ring() -> AsyncIterator[Ring]:
    async with opened_ring() as ring:
        yield ring


def run_of(fd: int, page: int, buffers: Sequence[bytearray]) -> IoRun:
    return rings.run_of(fd, page, [memoryview(each) for each in buffers], sum(map(len, buffers)))


async def ended(ring: Ring, doing: DiskOperation, runs: Sequence[IoRun]) -> Flight:
    """Starts runs and returns their flight once the kernel no longer uses the memory."""
    told: list[Flight] = []
    over = asyncio.Event()
    ring.submit(doing, runs, on_done=told.append, on_released=over.set)
    await over.wait()
    ring.validate()
    (flight,) = told
    return flight


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, FILE_PAGES + 2), st.integers(1, LONG_PAGES)), min_size=1, max_size=8),
        min_size=1,
        max_size=8,
    )
)
def test_the_ring_reads_the_same_bytes_as_system_calls(file: int, batches: list[list[tuple[int, int]]]) -> None:
    """Concurrent batches into several buffers read the file's bytes. A run beyond the file's end counts as failed."""

    async def read(ring: Ring, batch: list[tuple[int, int]]) -> list[bytes | None]:
        sizes = [[1] * (num_pages % 3) + [3] * (num_pages // 3) for _, num_pages in batch]  # of pieces, in pages
        memories = [[bytearray(size * PAGE) for size in each] for each in sizes]
        runs = [run_of(file, page, m) for (page, _), m in zip(batch, memories, strict=True)]
        flight = await ended(ring, DiskOperation.READ, runs)
        return [b"".join(m) if flight.is_whole(index) else None for index, m in enumerate(memories)]

    async def play() -> list[list[bytes | None]]:
        async with opened_ring() as ring:
            return await asyncio.gather(*(read(ring, batch) for batch in batches))

    def there(page: int, num_pages: int) -> bytes | None:
        content = os.pread(file, num_pages * PAGE, page * PAGE)
        return content if len(content) == num_pages * PAGE else None

    assert asyncio.run(play()) == [[there(*run) for run in batch] for batch in batches]


async def test_a_ring_takes_no_more_than_it_has_slots_and_no_longer_vectors(ring: Ring, file: int) -> None:
    one = run_of(file, 0, [bytearray(PAGE)])
    assert not ring.takes([run_of(file, 0, [bytearray(PAGE)] * (MAX_VECTORS + 1))])
    assert not ring.takes([one] * (NUM_SLOTS + 1))
    task = asyncio.create_task(ended(ring, DiskOperation.READ, [one] * NUM_SLOTS))
    await asyncio.sleep(0)
    assert len(ring._under_way) == NUM_SLOTS
    assert not ring.takes([one])
    await task
    assert ring.takes([one] * NUM_SLOTS)


async def test_one_failed_run_does_not_affect_the_others(ring: Ring, file: int) -> None:
    closed = os.dup(file)
    os.close(closed)
    memory = bytearray(PAGE)
    flight = await ended(ring, DiskOperation.READ, [run_of(file, 1, [memory]), run_of(closed, 1, [bytearray(PAGE)])])
    assert [flight.is_whole(0), flight.is_whole(1)] == [True, False]
    assert memory == os.pread(file, PAGE, PAGE)


async def test_a_flight_given_up_reports_once_and_keeps_its_memory_until_it_ends(ring: Ring, file: int) -> None:
    told: list[Flight] = []
    over = asyncio.Event()
    runs = [run_of(file, 0, [bytearray(PAGE)])]
    ring.submit(DiskOperation.READ, runs, on_done=told.append, on_released=over.set)
    ring.give_up(everything=False)
    ring.give_up(everything=True)
    assert len(told) == 1
    assert told[0].given_up
    assert not told[0].is_whole(0)
    assert not over.is_set()
    assert len(ring._under_way) == 1
    await over.wait()
    assert len(told) == 1


async def test_without_a_ring_everything_goes_through_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container that forbids io_uring, or on a system without it."""
    monkeypatch.setattr(rings.ring_libraries()[0], "ring_open", Mock(return_value=errno.EPERM))
    async with opened(tmp_path) as stand:
        assert stand.tier._ring is None
        await stand.put([written(1)])
        assert await stand.holds(written(1))


@pytest.mark.usefixtures("ring")
async def test_the_ring_moves_aligned_data_without_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only two of the ring's pages are free: for a header and an end mark."""
    memory = memoryview(mmap.mmap(-1, 4 * PAGE))
    async with opened(tmp_path) as stand:
        ring = stand.tier._ring
        assert ring is not None
        held = ring._pool.take(MAX_PAGES - 2)
        source = written(1, len(memory))
        memory[:] = source.memory
        for name in ("read", "write"):
            monkeypatch.setattr(ObjectIo, name, Mock(side_effect=AssertionError("a thread moves it")))
        assert await stand.put([DiskWrite(object=source.object, memory=memory)]) == [True]
        assert await stand.tier.read([stand.read_of(source.object, memory)]) == [True]
        ring._pool.give_back(held)


@pytest.mark.usefixtures("ring")
async def test_threads_do_what_the_ring_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread reads and writes unaligned objects that are too long for the loop to copy, or that come while all of the
    ring's pages are in use, and objects whose flight is not whole."""
    options = dataclasses.replace(SMALL, segment_bytes=2**20)
    async with opened(tmp_path, options, capacity=2**23) as stand:

        async def comes_back(write: DiskWrite) -> None:
            assert await stand.put([write]) == [True]
            assert await stand.holds(write)

        await comes_back(written(1, 300_000))
        ring = stand.tier._ring
        assert ring is not None
        held = ring._pool.take(MAX_PAGES)
        with pytest.raises(OutOfPages):
            ring._pool.take(1)
        await comes_back(written(2))
        ring._pool.give_back(held)
        note = Ring._note
        monkeypatch.setattr(Ring, "_note", lambda ring, slot, nbytes: note(ring, slot, -errno.EIO))
        await comes_back(written(3))
        assert stand.tier.counters["objects_read"] == 3
