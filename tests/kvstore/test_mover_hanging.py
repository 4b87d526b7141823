"""What a node does when its disk does not answer: readers get a miss, memory is kept, and it can be stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvstore.disk.base import Health
from kvstore.disk.tier import DiskOptions, SsdTier
from tests.kvstore.disk.hanging import Clock, HangingCalls, stuck, until_it_hangs
from tests.kvstore.test_mover import DISK, MEMORY, Node, ignore, key

LIMIT_S = DiskOptions().time_limit_s


async def for_ever(seconds: float) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def node_with_cold_objects(
    folder: Path, calls: HangingCalls, clock: Clock
) -> AsyncIterator[tuple[Node, SsdTier]]:
    """Sixty objects, most of them on disk only."""
    node = Node()
    options = DiskOptions(calls=calls, clock=clock, sleep=for_ever, ring=False)
    mover = node.mover
    disk = await SsdTier.open(folder, DISK, options, mover.relocated, mover.health_changed)
    mover.disk = disk
    node.state.catalog.use_disk(disk)
    await mover.recover(disk, ignore)
    for number in range(60):
        node.put(number)
    await mover.make_room(MEMORY // 2, 10.0)
    yield node, disk
    node.state.validate()


def only_on_disk(node: Node) -> int:
    return next(n for n in range(60) if (o := node.state.catalog.find(key(n))) and o.offset is None)


async def test_who_waits_for_a_hanging_disk_gets_a_miss_and_its_memory_is_kept(
    tmp_path: Path,
) -> None:
    calls, clock = HangingCalls("read"), Clock()
    async with node_with_cold_objects(tmp_path, calls, clock) as (node, disk):
        lease = node.state.readers.lease("l", [key(only_on_disk(node))], 30.0, 0.0)
        [load] = lease.loads
        with stuck(calls):
            node.mover.load(lease.loads)
            await until_it_hangs(calls)
            clock.now += LIMIT_S + 1
            disk.look_at_waits()
            await node.mover.loaded(lease)
            assert node.mover.health is Health.FAILED
            assert not node.state.readers.settle("l").objects
            assert node.state.moves.extents() == [(load.offset, load.object.length)]
            node.state.validate()
        await node.mover.close()
        assert not node.state.moves.extents()


async def test_a_node_stops_although_its_disk_hangs(tmp_path: Path) -> None:
    calls, clock = HangingCalls("read"), Clock()
    async with node_with_cold_objects(tmp_path, calls, clock) as (node, disk):
        lease = node.state.readers.lease("l", [key(only_on_disk(node))], 30.0, 0.0)
        with stuck(calls):
            node.mover.load(lease.loads)
            await until_it_hangs(calls)
            stopping = asyncio.create_task(node.mover.close())
            await asyncio.sleep(0)
            assert not stopping.done()
            clock.now += LIMIT_S + 1
            disk.look_at_waits()
            await stopping
        await asyncio.to_thread(disk._threads.close)
