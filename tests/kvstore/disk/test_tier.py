"""The disk tier over real files: writes, reads, restarts and reclaiming."""

import dataclasses
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from moonserve.kvstore.disk.base import PAGE
from moonserve.kvstore.disk.io.folder import Folder
from moonserve.kvstore.disk.io.format import FORMAT_VERSION
from moonserve.kvstore.disk.io.uring import Ring
from moonserve.kvstore.disk.tier import DiskOptions, SsdTier
from moonserve.protocol.errors import ConfigError
from tests.kvstore.disk.tiers import SEGMENT, SMALL, Owner, Stand, found_in, opened, written
from tests.patience import begin_and_cancel


@pytest.fixture(autouse=True, params=["ring", "threads"])
def small_reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs every test with io_uring and with threads."""
    if request.param == "threads":
        monkeypatch.setattr(Ring, "opened", lambda waits: None)


async def test_compaction_always_reclaims_the_space_of_released_objects(tmp_path: Path) -> None:
    async with opened(tmp_path) as stand:
        kept = [written(number) for number in range(1000, 1010)]
        assert all(await stand.put(kept))
        for number in range(300):
            write = written(number)
            assert await stand.put([write]) == [True], number
            if number % 10:
                await stand.forget(write.object)
            else:
                stand.release(write.object)
        await stand.settled()
        assert stand.tier.counters["segments_compacted"] > 10
        assert await stand.holds(*kept)
    async with opened(tmp_path) as stand:
        assert {write.object for write in kept} <= set(stand.owner.places)


async def test_one_call_that_fills_segments_leaves_room_for_their_footers(tmp_path: Path) -> None:
    """A call that fills segments leaves room for their footers: records not yet durable count for the footer's size."""
    options = DiskOptions(segment_bytes=256 * PAGE, num_threads=2)
    writes = [written(number, 100, tenant="t" * number) for number in range(300)]
    async with opened(tmp_path, options, capacity=8 * 256 * PAGE) as stand:
        assert all(await stand.put(writes))
        assert await stand.holds(*writes)
    assert await found_in(tmp_path, options, capacity=8 * 256 * PAGE) == {write.object for write in writes}


async def test_objects_larger_than_a_segment_or_header_allows_are_refused(tmp_path: Path) -> None:
    largest = SEGMENT - 4 * PAGE  # segment head, object header and two pages of footer
    async with opened(tmp_path) as stand:
        assert [stand.tier.takes(largest), stand.tier.takes(largest + 1)] == [True, False]
        assert await stand.put([written(1, largest + 1)]) == [False]
        assert await stand.put([written(2, largest)]) == [True]
        assert await stand.put([written(3, tenant="t" * 2000)]) == [False]


async def test_a_read_at_a_released_place_is_a_miss(tmp_path: Path) -> None:
    async with opened(tmp_path) as stand:
        await stand.put([written(1), written(2)])
        there = stand.read_of(written(2).object)
        assert await stand.tier.read([dataclasses.replace(there, object=written(1).object)]) == [False]
        assert stand.tier.counters["read_mismatches"] == 1


async def test_a_cancelled_write_is_not_found_later(tmp_path: Path) -> None:
    async with opened(tmp_path) as stand:
        await begin_and_cancel(stand.tier.write([written(1)]))
        assert stand.tier.usage().live == 0
    assert not await found_in(tmp_path)


async def test_a_cancelled_read_no_longer_writes_to_its_memory(tmp_path: Path) -> None:
    async with opened(tmp_path) as stand:
        await stand.put([written(1)])
        await begin_and_cancel(stand.tier.read([stand.read_of(written(1).object)]))
        assert stand.tier._scratch.num_borrowed == 0


async def test_a_replaced_folder_is_refused(tmp_path: Path) -> None:
    """A folder is refused if its identity has another format, is damaged or lost, or if it has a foreign segment."""
    for name in ("a", "b"):
        async with opened(tmp_path / name) as stand:
            await stand.put([written(1)])
    [segment] = (tmp_path / "a").glob("segment-*")
    identity = tmp_path / "a" / "folder.json"
    entry = json.loads(identity.read_text())

    async def refused(folder: str, why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            await found_in(tmp_path / folder)

    identity.write_text(json.dumps(entry | {"format": FORMAT_VERSION + 1}))
    await refused("a", f"format {FORMAT_VERSION + 1}")
    identity.write_text('{"format": 1}')
    await refused("a", "cannot be read")
    identity.unlink()
    await refused("a", "restore it, or empty")
    segment.rename(tmp_path / "b" / "segment-0000000099.kv")
    await refused("b", "belongs to another folder")


async def test_a_smaller_capacity_keeps_what_is_there_until_it_is_released(tmp_path: Path) -> None:
    async with opened(tmp_path) as stand:
        writes = [written(number) for number in range(25)]
        assert all(await stand.put(writes))
    async with opened(tmp_path, capacity=4 * SEGMENT) as stand:
        assert set(stand.owner.places) == {write.object for write in writes}
        assert await stand.put([written(100)]) == [False]
        for write in writes:
            stand.release(write.object)
        await stand.settled()
        assert stand.tier.usage().capacity == 4 * SEGMENT
        assert await stand.put([written(101)]) == [True]


async def test_another_segment_size_reads_the_segments_of_the_former(tmp_path: Path) -> None:
    async with opened(tmp_path) as stand:
        await stand.put([written(1)])
    larger = DiskOptions(segment_bytes=2 * SEGMENT, num_threads=2)
    async with opened(tmp_path, larger) as stand:
        assert await stand.holds(written(1))
        assert await stand.put([written(2, 80_000)]) == [True]


async def test_a_capacity_of_too_few_segments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 4 segments"):
        await SsdTier.open(tmp_path, 3 * SEGMENT, SMALL, Owner().moved, Owner().health_changed)


async def test_nothing_is_left_open(tmp_path: Path) -> None:
    async with opened(tmp_path):
        pass
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        async with opened(tmp_path) as stand:
            await stand.put([written(number) for number in range(30)])
            for about in list(stand.owner.places):
                stand.release(about)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_recovery_yields_batches_and_reports_progress(tmp_path: Path) -> None:
    """After a cancelled recovery, the next one finds everything."""
    async with opened(tmp_path) as stand:
        assert all(await stand.put([written(number) for number in range(20)]))
    tier = await SsdTier.open(tmp_path, 8 * SEGMENT, SMALL, Owner().moved, Owner().health_changed)
    recovery = tier.recover(lambda share: None)
    await anext(recovery)
    await recovery.aclose()  # type: ignore[attr-defined]
    await tier.close()
    shares: list[float] = []
    tier = await SsdTier.open(tmp_path, 8 * SEGMENT, SMALL, Owner().moved, Owner().health_changed)
    pieces = [piece async for piece in tier.recover(shares.append)]
    await tier.close()
    assert len(pieces) > 1
    assert sum(map(len, pieces)) == 20
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


async def test_the_next_segment_is_prepared_ahead_and_becomes_a_spare_file_if_unused(tmp_path: Path) -> None:
    async with opened(tmp_path) as stand:
        segments, log = stand.tier._segments, stand.tier._log
        await put_while(stand, lambda: not log.is_nearly_full)
        assert segments._prepared is not None
        await segments._prepared
        assert (len(log.segments), len(list(tmp_path.glob("segment-*")))) == (1, 2)
        await put_while(stand, lambda: len(log.segments) == 1)
        assert len(list(tmp_path.glob("segment-*"))) == 2
        await put_while(stand, lambda: not log.is_nearly_full)
    assert len(list(tmp_path.glob("segment-*"))) == 2
    assert len(list(tmp_path.glob("free-*"))) == 1
    assert await found_in(tmp_path) == set(stand.owner.places)


async def put_while(stand: Stand, holds: Callable[[], bool]) -> None:
    while holds():
        assert await stand.put([written(len(stand.owner.places))]) == [True]


async def test_a_segment_that_cannot_be_prepared_is_asked_for_again_when_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as stand:
        log = stand.tier._log
        assert await stand.put([written(0)]) == [True]
        with monkeypatch.context() as patch:
            patch.setattr(Folder, "create", Mock(side_effect=OSError(errno.ENOSPC, "full")))
            await put_while(stand, lambda: not log.is_nearly_full)
            prepared = stand.tier._segments._prepared
            assert prepared is not None
            assert await prepared is None
        await put_while(stand, lambda: len(log.segments) == 1)
        assert stand.tier.counters["errors_ENOSPC"] == 0
