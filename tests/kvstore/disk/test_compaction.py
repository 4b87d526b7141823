"""Compaction of a segment whose objects are released, forgotten, or cannot be copied meanwhile."""

import asyncio
import errno
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moonserve.kvstore.disk import compaction
from moonserve.kvstore.disk.base import DiskRead, Pin
from moonserve.kvstore.disk.compaction import merge_tombstones
from moonserve.kvstore.disk.io.format import Tombstone
from moonserve.protocol.kv_blocks import BlockKey
from tests.kvstore.disk.tiers import failing, found_in, objects, opened, stuck, until_it_hangs, written


async def test_an_object_released_during_its_copy_is_forgotten_before_its_source_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living, photo = tmp_path / "living", tmp_path / "photo"
    monkeypatch.setattr(compaction, "_BATCH_BYTES", 1)
    async with failing(living, "write") as (calls, stand):
        rename = calls.rename

        def photographed(source: Path, target: Path) -> None:
            rename(source, target)
            if source.name == f"segment-{1:010}.kv":
                shutil.copytree(living, photo)

        monkeypatch.setattr(calls, "rename", photographed)
        number = 1
        while (await stand.put([written(number, generation=number)]))[0]:
            number += 1  # until only the segment reserved for compaction is free
        first, given_up, *others = stand.owner.places
        with stuck(calls):
            stand.release(first)  # makes its segment worth compacting
            await until_it_hangs(calls)
            stand.release(given_up)
        await stand.settled()
        assert 1 not in stand.tier._log.segments
    assert await found_in(photo) == set(others)


@pytest.mark.parametrize("what", ["write", "sync"])
async def test_an_object_that_could_not_be_copied_stays(tmp_path: Path, what: str) -> None:
    async with failing(tmp_path) as (calls, stand):
        assert await stand.put([written(1), written(2)]) == [True, True]
        segment = await stand.sealed()
        calls.errors[what] = errno.EIO
        await stand.tier._compactor._compact(segment)
        calls.errors.clear()
        await stand.tier.check()
        assert await stand.put([written(3)]) == [True]
        assert await stand.holds(written(1))
    assert await found_in(tmp_path) == objects(1, 2, 3)


async def test_an_object_released_during_a_failed_copy_does_not_return(tmp_path: Path) -> None:
    """The copy is whole; only its flush reports failure."""
    living, photo = tmp_path / "living", tmp_path / "photo"
    async with failing(living, "sync") as (calls, stand):
        assert await stand.put([written(1), written(2)]) == [True, True]
        segment = await stand.sealed()
        calls.num_to_fail = 1
        with stuck(calls):
            compacting = asyncio.create_task(stand.tier._compactor._compact(segment))
            await until_it_hangs(calls)
            stand.release(written(1).object)
        await compacting
        await stand.tier.check()
        await stand.tier._compactor.wait_until_idle()
        await stand.tier._compactor._compact(segment)
        assert segment.number not in stand.tier._log.segments
        shutil.copytree(living, photo)
    assert await found_in(photo) == objects(2)


async def test_an_object_removed_during_its_copy_stays_removed_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of a removed object stays removed in a crash, although it lies behind the tombstone and outlasts it."""
    living, photo = tmp_path / "living", tmp_path / "photo"
    async with opened(living) as stand:
        assert await stand.put([written(1), written(2)]) == [True, True]
        segment, compactor = await stand.sealed(), stand.tier._compactor
        read, moved = compactor._reader.read, compactor._moved

        async def forgotten_meanwhile(reads: Sequence[DiskRead]) -> list[bool]:
            good = await read(reads)
            await stand.forget(written(1).object)
            stand.tier._segments.seal(stand.tier._writer._landed_in)
            assert await stand.tier._segments.wait_for_footer()
            return good

        def dies_when_it_was_copied(*move: Any) -> bool:
            shutil.copytree(living, photo, dirs_exist_ok=True)
            return moved(*move)

        monkeypatch.setattr(compactor._reader, "read", forgotten_meanwhile)
        monkeypatch.setattr(compactor, "_moved", dies_when_it_was_copied)
        await compactor._compact(segment)
    assert await found_in(photo) == objects(2)
    assert not (photo / f"segment-{2:010}.kv").exists()  # it had the tombstone
    assert await found_in(photo) == objects(2)


def test_duplicate_tombstones_are_merged_for_the_later_segment() -> None:
    """The later of two tombstones of one object is kept: it covers a copy in a segment after the earlier one."""
    key = BlockKey(bytes(16))
    later, earlier = Tombstone(key, 5, segment=9), Tombstone(key, 5, segment=7)
    pin = Tombstone(key, 5, segment=3, pin=Pin.HARD)
    for order in ([later, pin, earlier], [earlier, later, pin]):
        assert set(merge_tombstones(order)) == {later, pin}
