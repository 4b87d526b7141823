"""Torn tails, flipped bits and truncated files: reads return no wrong byte, and objects before the damage are found."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moonserve.kvstore.disk.base import PAGE
from moonserve.kvstore.disk.io.format import extent_pages
from tests.kvstore.disk.tiers import SEGMENT, Stand, opened, written
from tests.kvstore.faults.mounts import flip, segments

LENGTH = 5_000
EXTENT = extent_pages(LENGTH) * PAGE
COUNT = 4
WRITES = [written(number, LENGTH) for number in range(COUNT)]
BEGIN_OF_LAST = PAGE + (COUNT - 1) * EXTENT


@pytest.fixture
async def crashed(tmp_path: Path) -> Path:
    """The segment of a node that wrote each of `WRITES` as a group of its own and crashed."""
    async with opened(tmp_path / "living") as stand:
        for write in WRITES:
            assert await stand.put([write]) == [True]
        await stand.settled()  # the next segment's file exists, too
        shutil.copytree(tmp_path / "living", tmp_path / "crashed")
    return segments(tmp_path / "crashed")[0]


@pytest.fixture
async def sealed(tmp_path: Path) -> Path:
    async with opened(tmp_path / "stopped") as stand:
        await stand.put(WRITES)
    return segments(tmp_path / "stopped")[0]


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


async def correct(stand: Stand) -> int:
    """Returns the number of objects found; each of them must read back right or be a miss."""
    contents = {write.object: bytes(write.memory) for write in WRITES}
    for about in stand.owner.places:
        assert await stand.get(about) in (contents[about], None)
    return len(stand.owner.places)


async def test_after_a_crash_between_writes_nothing_is_torn(crashed: Path) -> None:
    for _ in range(2):
        async with opened(crashed.parent) as stand:
            assert await correct(stand) == COUNT
            assert stand.tier.counters["corrupt_tails"] == 0


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: os.truncate(path, BEGIN_OF_LAST + 700), id="truncated"),
        pytest.param(lambda path: overwrite(path, BEGIN_OF_LAST, os.urandom(99)), id="garbage"),
        pytest.param(lambda path: overwrite(path, BEGIN_OF_LAST + 64, bytes(99)), id="half-header"),
        pytest.param(lambda path: flip(path, BEGIN_OF_LAST + PAGE + 4_000), id="data"),
        pytest.param(lambda path: overwrite(path, BEGIN_OF_LAST, bytes(EXTENT)), id="never-came"),
    ],
)
async def test_a_torn_tail_is_cut_off_and_reported_and_all_before_it_is_kept(
    crashed: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(crashed)
    with caplog.at_level(logging.WARNING):
        async with opened(crashed.parent) as stand:
            assert await correct(stand) == COUNT - 1
            assert stand.tier.counters["corrupt_tails"] == 1
            assert await stand.put([WRITES[-1]]) == [True]
    assert "was cut off at page" in caplog.text
    async with opened(crashed.parent) as stand:
        assert await correct(stand) == COUNT
        assert stand.tier.counters["corrupt_tails"] == 0


@pytest.mark.parametrize(
    "offset",
    [
        pytest.param(30, id="head"),
        pytest.param(PAGE + EXTENT + 50, id="header"),
        pytest.param(SEGMENT - PAGE - 4_000, id="records"),
        pytest.param(SEGMENT - PAGE + 50, id="trailer"),
    ],
)
async def test_a_flipped_bit_in_a_sealed_segment_costs_one_object_at_most(sealed: Path, offset: int) -> None:
    flip(sealed, offset)
    async with opened(sealed.parent) as stand:
        assert await correct(stand) == COUNT
        assert stand.tier.counters["read_mismatches"] == (offset == PAGE + EXTENT + 50)


async def test_compaction_drops_and_counts_what_is_damaged(tmp_path: Path) -> None:
    async with opened(tmp_path) as stand:
        await stand.put(WRITES)
        flip(segments(tmp_path)[0], PAGE + PAGE + 123)
        stand.release(WRITES[1].object)
        number = 1000
        while (await stand.put([written(number)]))[0]:
            number += 1
        await stand.settled()
        assert stand.owner.moves
        assert stand.tier.counters["objects_rotten"] == 1
        del stand.owner.places[WRITES[0].object]


async def test_a_segment_that_is_nothing_but_garbage_costs_only_itself(tmp_path: Path) -> None:
    async with opened(tmp_path) as stand:
        assert all(await stand.put([written(number, 20_000) for number in range(4)]))
    segments(tmp_path)[0].write_bytes(os.urandom(SEGMENT))
    async with opened(tmp_path) as stand:
        assert 0 < len(stand.owner.places) < 4
        assert None not in [await stand.get(about) for about in stand.owner.places]
        assert stand.tier.counters["corrupt_tails"] == 1


async def test_an_empty_segment_file_is_harmless(sealed: Path) -> None:
    os.truncate(sealed, 0)
    async with opened(sealed.parent) as stand:
        assert not stand.owner.places
        assert await stand.put(WRITES) == [True] * COUNT
    async with opened(sealed.parent) as stand:
        assert await correct(stand) == COUNT
