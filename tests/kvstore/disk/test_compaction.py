"""A segment is compacted while its objects are given up, forgotten, or cannot be copied."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.disk import compaction
from kvstore.disk.base import DiskObject, DiskRead, Pin
from kvstore.disk.compaction import once_each
from kvstore.disk.files import FileCalls
from kvstore.disk.format import Tombstone
from kvstore.disk.log import Segment
from protocol.keys import BlockKey
from tests.kvstore.disk.faulty import FaultyCalls, faulty, stuck, until_it_hangs
from tests.kvstore.disk.tiers import SMALL, Stand, found_in, opened, written

KEY = BlockKey(bytes(16))


async def first_segment(stand: Stand) -> Segment:
    """Sealed, with its footer."""
    if stand.tier._log.active is stand.tier._log.segments[1]:
        stand.tier._segments.seal(stand.tier._writer._landed_in)
    await stand.settled()
    return stand.tier._log.segments[1]


async def filled(stand: Stand) -> list[DiskObject]:
    """Until it takes no more. Only the segment that is kept for compaction is left."""
    number = 1
    while (await stand.put([written(number, generation=number)]))[0]:
        number += 1
    return list(stand.owner.places)


class Photographer(FaultyCalls):
    """Copies the folder when its first segment has gone."""

    def __init__(self, folder: Path, photo: Path) -> None:
        super().__init__("write")
        self._folder = folder
        self._photo = photo

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if source.name == f"segment-{1:010}.kv":
            shutil.copytree(self._folder, self._photo)


async def test_what_was_given_up_while_it_was_copied_is_forgotten_before_its_source_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a full folder, where nothing can go with what the node writes."""
    monkeypatch.setattr(compaction, "_BATCH_BYTES", 1)
    calls = Photographer(tmp_path / "living", tmp_path / "photo")
    options = dataclasses.replace(SMALL, calls=calls, ring=False)
    async with opened(tmp_path / "living", options) as stand:
        first, given_up, *others = await filled(stand)
        with stuck(calls):
            stand.release(first)  # which makes its segment worth compacting
            await until_it_hangs(calls)
            stand.release(given_up)
        await stand.settled()
        assert 1 not in stand.tier._log.segments
    assert await found_in(tmp_path / "photo") == set(others)


@pytest.mark.parametrize("what", ["write", "sync"])
async def test_an_object_that_could_not_be_copied_stays(tmp_path: Path, what: str) -> None:
    calls, options = faulty()
    async with opened(tmp_path, options) as stand:
        assert await stand.put([written(1), written(2)]) == [True, True]
        segment = await first_segment(stand)
        calls.errors[what] = errno.EIO
        await stand.tier._compactor._compact(segment)
        calls.errors.clear()
        await stand.tier.check()
        assert await stand.put([written(3)]) == [True]
        assert await stand.get(written(1).object) is not None
    assert await found_in(tmp_path) == {written(number).object for number in (1, 2, 3)}


async def test_what_was_given_up_while_its_copy_failed_does_not_come_back(tmp_path: Path) -> None:
    """The copy is whole on disk, though its flush was said to have failed."""
    calls, options = faulty("sync")
    async with opened(tmp_path / "living", options) as stand:
        assert await stand.put([written(1), written(2)]) == [True, True]
        segment = await first_segment(stand)
        calls.num_to_fail = 1
        with stuck(calls):
            compacting = asyncio.create_task(stand.tier._compactor._compact(segment))
            await until_it_hangs(calls)
            stand.release(written(1).object)
        await compacting
        await stand.tier.check()
        await stand.tier._compactor.settled()
        await stand.tier._compactor._compact(segment)
        assert segment.number not in stand.tier._log.segments
        shutil.copytree(tmp_path / "living", tmp_path / "photo")
    assert await found_in(tmp_path / "photo") == {written(2).object}


class LastBefore(FileCalls):
    """Copies the folder before each write that follows on `begun`, until its first segment goes."""

    def __init__(self, folder: Path, photo: Path) -> None:
        self.begun = False
        self._folder = folder
        self._photo = photo

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.begun:
            shutil.rmtree(self._photo, ignore_errors=True)
            shutil.copytree(self._folder, self._photo)
        return super().pwritev(fd, buffers, offset)

    def rename(self, source: Path, target: Path) -> None:
        self.begun &= source.name != f"segment-{1:010}.kv"
        super().rename(source, target)


async def test_what_was_removed_while_it_was_copied_stays_removed_when_the_process_dies_before_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy lies behind the tombstone, and outlasts it."""
    living, photo = tmp_path / "living", tmp_path / "photo"
    calls = LastBefore(living, photo)
    async with opened(living, dataclasses.replace(SMALL, calls=calls, ring=False)) as stand:
        assert await stand.put([written(1), written(2)]) == [True, True]
        segment = await first_segment(stand)
        reader = stand.tier._compactor._reader
        read = reader.read

        async def forgotten_meanwhile(reads: Sequence[DiskRead]) -> list[bool]:
            good = await read(reads)
            await stand.forget(written(1).object)
            stand.tier._segments.seal(stand.tier._writer._landed_in)
            assert await stand.tier._segments.sealed()
            calls.begun = True
            return good

        monkeypatch.setattr(reader, "read", forgotten_meanwhile)
        await stand.tier._compactor._compact(segment)
    assert await found_in(photo) == {written(2).object}
    assert not (photo / f"segment-{2:010}.kv").exists()  # the tombstone's
    assert await found_in(photo) == {written(2).object}


def test_a_tombstone_that_is_there_twice_is_kept_for_the_later_segment() -> None:
    """The later one was written for a copy in a segment that the earlier one knows nothing of."""
    later, earlier = Tombstone(KEY, 5, segment=9), Tombstone(KEY, 5, segment=7)
    pin = Tombstone(KEY, 5, segment=3, pin=Pin.HARD)
    for order in ([later, pin, earlier], [earlier, later, pin]):
        assert set(once_each(order)) == {later, pin}
