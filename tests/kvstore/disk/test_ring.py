"""Reads through io_uring beside the same reads by system calls, over real files."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.disk.base import PAGE
from kvstore.disk.ring import NUM_SLOTS, SLOT_PAGES, Ring, RingRead
from kvstore.disk.waits import Waits
from tests.kvstore.disk.tiers import opened, written

FILE_PAGES = 3 * SLOT_PAGES


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path: Path = tmp_path_factory.mktemp("ring") / "file"
    path.write_bytes(random.Random(0).randbytes(FILE_PAGES * PAGE))
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def ring_or_skip() -> Ring:
    ring = Ring.opened(Waits())
    if ring is None:
        pytest.skip("no io_uring here, or no liburing")
    return ring


async def contents(ring: Ring, reads: list[RingRead]) -> list[bytes | None]:
    landing = await ring.read(reads)
    found = [ring.content(landing, index) for index in range(len(reads))]
    copied = [None if content is None else bytes(content) for content in found]
    ring.give_back(landing)
    ring.validate()
    return copied


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, FILE_PAGES + 2), st.integers(1, SLOT_PAGES)),
            min_size=1,
            max_size=8,
        ),
        min_size=1,
        max_size=8,
    )
)
def test_what_lands_is_what_a_system_call_reads(
    file: int, batches: list[list[tuple[int, int]]]
) -> None:
    """Several batches at once, short at the end of the file and empty behind it."""

    async def run() -> None:
        ring = ring_or_skip()
        try:
            asked = [[RingRead(file, page, num) for page, num in batch] for batch in batches]
            landed = await asyncio.gather(*(contents(ring, reads) for reads in asked))
            for batch, found in zip(batches, landed, strict=True):
                assert found == [os.pread(file, num * PAGE, page * PAGE) for page, num in batch]
            assert ring.takes([1] * NUM_SLOTS)
        finally:
            ring.close()

    asyncio.run(run())


async def test_a_ring_takes_no_more_than_it_has_slots_and_nothing_longer(file: int) -> None:
    ring = ring_or_skip()
    assert not ring.takes([SLOT_PAGES + 1])
    assert not ring.takes([1] * (NUM_SLOTS + 1))
    task = asyncio.create_task(contents(ring, [RingRead(file, 0, 1)] * NUM_SLOTS))
    await asyncio.sleep(0)
    assert ring.num_under_way == NUM_SLOTS
    assert not ring.takes([1])
    await task
    assert ring.takes([1])
    ring.close()


async def test_a_read_that_fails_spoils_none_of_the_others(file: int) -> None:
    ring = ring_or_skip()
    closed = os.dup(file)
    os.close(closed)
    found = await contents(ring, [RingRead(file, 1, 1), RingRead(closed, 1, 1)])
    assert found == [os.pread(file, PAGE, PAGE), None]
    ring.close()


async def test_a_cancelled_read_gives_its_slots_back_once_the_disk_is_done(file: int) -> None:
    ring = ring_or_skip()
    task = asyncio.create_task(contents(ring, [RingRead(file, 0, 1)] * 3))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ring.num_under_way == 0
    assert ring.takes([1] * NUM_SLOTS)
    ring.close()


async def test_vectors_of_buffers_are_made_once(file: int) -> None:
    """The package never lets go of one."""
    ring = ring_or_skip()
    for number in range(5 * NUM_SLOTS):
        await contents(ring, [RingRead(file, number % FILE_PAGES, 1 + number % 2)])
    assert len(ring._vectors) <= 2 * NUM_SLOTS
    ring.close()


async def test_without_the_package_there_is_no_ring_and_reads_go_through_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "liburing", None)
    async with opened(tmp_path) as stand:
        assert stand.tier._ring is None
        await stand.put([written(1)])
        assert await stand.get(written(1).object) == bytes(written(1).memory)


async def test_what_the_ring_cannot_read_a_thread_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring_or_skip().close()
    async with opened(tmp_path) as stand:
        await stand.put([written(1)])
        assert stand.tier._ring is not None
        monkeypatch.setattr(stand.tier._ring, "content", lambda landing, index: None)
        assert await stand.get(written(1).object) == bytes(written(1).memory)
        assert stand.tier.counters["objects_read"] == 1
