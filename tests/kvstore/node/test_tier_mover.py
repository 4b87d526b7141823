"""The mover over a real disk: demotion, loads, removals, recovery, and a disk that hangs or fails."""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from moonserve.kvstore.disk.base import DiskObject, Health, Place
from moonserve.kvstore.disk.io.folder import Folder
from moonserve.kvstore.disk.tier import DiskOptions, SsdTier
from moonserve.kvstore.node import verification
from moonserve.kvstore.node.catch_up import CatchUp
from moonserve.kvstore.node.tier_mover import TierMover
from moonserve.kvstore.node.verification import Verifier
from moonserve.kvstore.state.objects import Lease, PutRequest, Watermarks
from moonserve.kvstore.state.state import StoreState
from moonserve.protocol.kv_blocks import BlockKey, checksum
from moonserve.transfer import Segment
from tests.clock import Clock
from tests.kvstore.disk.tiers import FaultyCalls, for_ever, stuck, until_it_hangs
from tests.kvstore.node.nodes import key
from tests.kvstore.state.states import Heard, make_state
from tests.patience import NEVER_S, PATIENCE_S

SIZE = 8192
MEMORY = 64 * SIZE
DISK = 4 * 2**20


def value(number: int) -> bytes:
    return number.to_bytes(4, "little") * (SIZE // 4)


class Node:
    """A pure node, its memory, and a mover between its memory and a disk."""

    def __init__(self) -> None:
        marks = Watermarks(evict_above=0.5, evict_share=0.25)
        self.state: StoreState = make_state(MEMORY, Heard(), watermarks=marks)
        self.memory = memoryview(bytearray(MEMORY))
        self.mover = TierMover(self.state, self.memory, lambda: None)

    def put(self, number: int, content: bytes | None = None, *, second_hand: bool = False) -> None:
        """Stores the number's own value, unless `content` is given."""
        content = value(number) if content is None else content
        name = f"r{number} {content[:4].hex()}"
        wish = PutRequest(key=key(number), parent=None, length=len(content), is_copied=second_hand)
        reservation = self.state.reservations.reserve(name, [wish], 30.0, 0.0)
        offset = reservation.slots[0].offset
        self.memory[offset : offset + len(content)] = content
        self.state.reservations.commit(name, {key(number): checksum([content])}, 0.0)
        self.state.reservations.verified(name, [], 0.0)

    async def get(self, number: int) -> bytes:
        """Loads an object that is only on disk and returns its bytes."""
        lease = self.state.leases.grant("l", [key(number)], 10.0, 0.0)
        self.mover.start_reads(lease.loads)
        await self.mover.wait_for_reads(lease)
        [stored] = self.state.leases.settle("l").objects
        assert stored.offset is not None
        content = bytes(self.memory[stored.offset : stored.offset + SIZE])
        self.state.leases.release("l", 0.0)
        return content

    def present(self, numbers: range) -> list[int]:
        return [n for n, there in zip(numbers, self.state.catalog.present([*map(key, numbers)]), strict=True) if there]


def ignore(*_: object) -> None:
    """Callback for recovery progress that does nothing."""


async def with_disk(folder: Path, options: DiskOptions | None = None) -> tuple[Node, SsdTier]:
    """Returns a node with a disk that is not yet recovered."""
    node = Node()
    moved, health_changed = node.state.tier_moves.relocated, node.mover.health_changed
    disk = await SsdTier.open(folder, DISK, options or DiskOptions(), moved, health_changed)
    node.mover.set_disk(disk)
    node.state.catalog.use_disk(disk)
    return node, disk


@asynccontextmanager
async def node_on(folder: Path) -> AsyncIterator[Node]:
    node, disk = await with_disk(folder)
    await node.mover.recover(disk, ignore)
    try:
        yield node
        node.state.validate()
    finally:
        await node.mover.close()


async def test_cold_objects_go_to_disk_and_are_all_found_after_a_restart(tmp_path: Path) -> None:
    async with node_on(tmp_path) as node:
        for number in range(60):
            node.put(number)
        await node.mover.wait_for_memory(MEMORY // 2, 10.0)
        assert node.state.catalog.usage().num_on_disk >= 28
        assert await node.mover.flush(10.0) == 0
    async with node_on(tmp_path) as again:
        assert again.present(range(60)) == [*range(60)]
        assert await again.get(7) == value(7)


@pytest.mark.parametrize("why", ["nothing", "is empty", "disk is full", "disk is not read yet"])
async def test_a_stop_says_how_many_objects_are_missing_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """A flush at stop returns the number of objects missing on disk. Nothing is written to a disk not yet recovered."""
    async with node_on(tmp_path) as node:
        if why == "disk is not read yet":
            assert node.mover.disk is not None
            node.mover.set_disk(node.mover.disk)
        node.put(1, b"" if why == "is empty" else None)
        if why == "disk is full":
            monkeypatch.setattr(Folder, "create", Mock(side_effect=OSError(errno.ENOSPC, "full")))
        assert await node.mover.flush(10.0) == why.startswith("disk")
        [stored] = node.state.catalog.objects()
        assert (stored.place is None) == why.startswith("disk")


async def test_a_stop_does_not_wait_for_a_lost_disk(tmp_path: Path) -> None:
    async with node_on(tmp_path) as node:
        node.put(1)
        node.mover._pause_writes()
        flushing = asyncio.create_task(node.mover.flush(NEVER_S))
        await asyncio.sleep(0)  # the flush waits for the disk
        node.state.remove([key(1)], corrupt=False)
        assert await asyncio.wait_for(flushing, PATIENCE_S) == 0


@pytest.mark.parametrize("removed", [True, False])
async def test_a_value_that_was_evicted_does_not_come_back_in_place_of_later_one(tmp_path: Path, removed: bool) -> None:
    """An evicted value does not come back if its key was removed before a later value was stored, even if the later one
    is lost with the memory, or if the later one is on disk, too."""
    async with node_on(tmp_path) as node:
        node.put(1)
        await node.mover.flush(10.0)
        node.state.remove([key(1)], corrupt=False)  # like an eviction, without notifying the disk
        if removed:
            await node.mover.forget({key(1): node.state.catalog.latest_generation})
        node.put(1, value(99))
        if not removed:
            assert await node.mover.flush(10.0) == 0
    async with node_on(tmp_path) as again:
        assert again.present(range(2)) == ([] if removed else [1])
        if not removed:
            assert await again.get(1) == value(99)


async def test_an_object_that_is_removed_before_it_is_found_is_not_taken_in(tmp_path: Path) -> None:
    async with node_on(tmp_path) as node:
        node.put(1)
        node.put(2)
        await node.mover.flush(10.0)
        later = node.state.catalog.latest_generation + 1
    early, disk = await with_disk(tmp_path)
    recovering = asyncio.create_task(early.mover.recover(disk, ignore))
    await asyncio.sleep(0)  # recovery has started
    await early.mover.forget({key(1): later})
    await recovering
    assert early.present(range(3)) == [2]
    await early.mover.close()
    async with node_on(tmp_path) as again:
        assert again.present(range(3)) == [2]


async def test_earlier_value_of_outdated_object_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node_on(tmp_path) as node:
        for content in (value(1), value(2)):
            node.put(1, content)
            await node.mover.flush(10.0)
            stored = node.state.catalog.find(key(1))
            assert stored is not None
            node.state.catalog.remove(stored)  # evicted, without notifying the disk

    class Elsewhere:
        """Reports only the latest value as outdated."""

        async def wait_until_decided(self) -> bool:
            return True

        async def outdated_keys(self, found: Sequence[DiskObject]) -> set[BlockKey]:
            return {each.key for each in found if each.generation == stored.generation}

    late, disk = await with_disk(tmp_path)
    recover = disk.recover

    async def one_by_one(progress: Callable[[float], None]) -> AsyncIterator[list[tuple[DiskObject, Place]]]:
        async for batch in recover(progress):
            for each in sorted(batch, key=lambda found: found[0].generation):
                yield [each]

    monkeypatch.setattr(disk, "recover", one_by_one)
    await late.mover.recover(disk, ignore, cast(CatchUp, Elsewhere()))
    assert late.state.counters["objects_restored"] == 1, "the earlier value was not found"
    assert late.present(range(2)) == []
    await late.mover.close()


async def test_a_copy_that_is_dropped_while_the_disk_moves_it_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_on(tmp_path) as node:
        node.put(1)
        assert await node.mover.flush(10.0) == 0
        disk = node.mover.disk
        assert isinstance(disk, SsdTier)
        disk._segments.seal(disk._writer._landed_in)
        assert await disk._segments.wait_for_footer()
        moved = disk._compactor._moved

        def dropped_and_moved(*move: Any) -> bool:
            assert node.state.catalog.drop_some_disk_copy()
            return moved(*move)

        monkeypatch.setattr(disk._compactor, "_moved", dropped_and_moved)
        await disk._compactor._compact(disk._log.segments[1])
        assert await node.mover.flush(10.0) == 0
        assert disk.usage().live == disk.space(SIZE)
    async with node_on(tmp_path) as again:
        assert again.present(range(3)) == [1]


# A hanging disk: readers get a miss, the memory of reads is kept, and the node can be stopped

LIMIT_S = DiskOptions().time_limit_s


@asynccontextmanager
async def hanging_read(folder: Path) -> AsyncIterator[tuple[Node, SsdTier, Lease, Clock]]:
    """Yields a node whose disk hangs while a reader waits for one of its 60 objects, most of which are only on disk."""
    calls, clock = FaultyCalls("read"), Clock()
    node, disk = await with_disk(folder, DiskOptions(calls=calls, clock=clock, sleep=for_ever, ring=False))
    await node.mover.recover(disk, ignore)
    for number in range(60):
        node.put(number)
    await node.mover.wait_for_memory(MEMORY // 2, 10.0)
    number = next(n for n in range(60) if (o := node.state.catalog.find(key(n))) and o.offset is None)
    lease = node.state.leases.grant("l", [key(number)], 30.0, 0.0)
    with stuck(calls):
        node.mover.start_reads(lease.loads)
        await until_it_hangs(calls)
        yield node, disk, lease, clock
    node.state.validate()


async def test_a_read_of_a_hanging_disk_is_a_miss_and_keeps_its_memory(tmp_path: Path) -> None:
    async with hanging_read(tmp_path) as (node, disk, lease, clock):
        [load] = lease.loads
        clock.now += LIMIT_S + 1
        disk.check_for_hang()
        await node.mover.wait_for_reads(lease)
        assert node.mover.health is Health.FAILED
        assert not node.state.leases.settle("l").objects
        assert node.state.tier_moves.reading_extents() == [(load.offset, load.object.length)]
        node.state.validate()
    await node.mover.close()
    assert not node.state.tier_moves.reading_extents()


async def test_a_node_stops_although_its_disk_hangs(tmp_path: Path) -> None:
    async with hanging_read(tmp_path) as (node, disk, _, clock):
        stopping = asyncio.create_task(node.mover.close())
        await asyncio.sleep(0)
        assert not stopping.done()
        clock.now += LIMIT_S + 1
        disk.check_for_hang()
        await stopping
    await asyncio.to_thread(disk._threads.close)


async def test_a_disk_that_heals_is_left_alone_until_the_next_start(tmp_path: Path) -> None:
    """A disk that recovers is not used before the next start, but catches up on a removal that it did not take."""
    calls = FaultyCalls()
    node, disk = await with_disk(tmp_path, DiskOptions(calls=calls, ring=False))
    await node.mover.recover(disk, ignore)
    node.put(1)
    assert await node.mover.flush(10.0) == 0
    calls.errors["write"] = errno.EROFS
    node.state.remove([key(1)], corrupt=False)
    assert not await node.mover.forget({key(1): node.state.catalog.latest_generation})
    calls.errors.clear()
    await disk.check()
    assert disk.health is Health.GOOD
    assert node.mover.health is Health.READ_ONLY
    assert not node.mover.usable
    await node.mover.close()
    async with node_on(tmp_path) as again:
        assert again.present(range(3)) == []


async def test_an_object_stored_in_place_of_a_corrupt_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "PIECE_BYTES", 0)  # compares all objects in threads
    node, checked = Node(), 0
    node.put(1)
    node.put(2)
    node.memory[:SIZE] = value(3)

    async def in_thread(work: Callable[[], bool]) -> bool:
        nonlocal checked
        checked += 1
        if checked == 2:  # a reader found the damage, too, and the object was stored anew
            node.state.remove([key(1)], corrupt=True)
            node.put(1, value(4))
        return work()

    segment = cast(Segment, SimpleNamespace(buffer=node.memory))
    replies = [reply async for reply in Verifier(node.state, node.mover, segment, in_thread).run()]
    assert [list(reply.corrupt) for reply in replies] == [[key(1)]]
    assert node.present(range(3)) == [1, 2]
    node.state.validate()
