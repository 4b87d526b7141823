"""Blocks in pieces of a worker's memory, at a real node: through mapped memory, in one round trip, or under a lease."""

import asyncio
import itertools
import os
from functools import partial

import pytest

from moonserve.kvstore.client.blocks import BlockStores
from moonserve.kvstore.client.blocks_fast_path import IN_LOOP_BYTES
from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.protocol.errors import InvalidRequest, PeerLost
from moonserve.protocol.request import Endpoint
from moonserve.transfer import FaultPlan, Segment, TransferEngine
from tests.kvstore.node.nodes import Node, chain_of, connected, exists, key, remove, running_node, stats_of, until_stats
from tests.patience import PATIENCE_S, answered

DRAM = 16 * 2**20
BLOCK = 64 * 1024
PIECES = 8
_FIRST = itertools.count(0, 1000)
ways = pytest.mark.parametrize("way", ["shm", "tcp"])


def fresh(count: int) -> range:
    """Returns numbers of keys that no other test has used."""
    first = next(_FIRST)
    return range(first, first + count)


def filled(transfer: TransferEngine, nbytes: int) -> Segment:
    local = transfer.allocate(nbytes)
    local.buffer[:] = os.urandom(nbytes)
    return local


async def read(client: BlockStores, store: Endpoint, numbers: range, slots: BufferSlots) -> list[int]:
    return await client.read(store, list(map(key, numbers)), slots, deadline_s=PATIENCE_S)


@ways
@pytest.mark.parametrize("num_blocks", [3, IN_LOOP_BYTES // BLOCK + 1, 4 * IN_LOOP_BYTES // BLOCK])
async def test_the_leading_run_comes_back_into_its_pieces(node: Node, way: str, num_blocks: int) -> None:
    """A read returns the blocks before the first absent one, on new and open connections, for few and many bytes."""
    numbers = fresh(num_blocks)
    async with connected(node.rpc_address, way) as (client, transfer, store):
        local = filled(transfer, num_blocks * BLOCK)
        before = bytes(local.buffer)
        objects, slots = chain_of(local, numbers, BLOCK, pieces=PIECES)
        assert (await client.put(store, objects, slots)).stored == num_blocks
        assert (await client.put(store, objects, slots)).present == num_blocks
        for _ in range(2):
            local.buffer[:] = bytes(local.nbytes)
            checksums = await read(client, store, numbers, slots)
            assert checksums == [each.checksum for each in objects]
            assert local.buffer == before
        await remove(client, store, [key(numbers[1])])
        assert await read(client, store, numbers, slots) == checksums[:1]
        await until_stats(client, store, lambda s: s.leased_bytes == s.reserved_bytes == 0)
        await remove(client, store, [each.key for each in objects])


@ways
async def test_a_corrupt_block_ends_the_run_and_is_removed(node: Node, way: str) -> None:
    numbers = fresh(4)
    async with connected(node.rpc_address, way) as (client, transfer, store):
        objects, slots = chain_of(filled(transfer, 4 * BLOCK), numbers, BLOCK, pieces=PIECES)
        await client.put(store, objects, slots)
        await read(client, store, numbers, slots)
        before = (await stats_of(client, store)).counters["integrity_failures"]
        lease = await client.lease(store, [each.key for each in objects])
        node.flip_byte(lease.objects[2].offset + 17, DRAM)
        await client.release_soon(lease)
        assert len(await read(client, store, numbers, slots)) == 2
        there = await exists(client, store, [each.key for each in objects])
        assert there == [True, True, False, True]
        assert (await stats_of(client, store)).counters["integrity_failures"] == before + 1


@ways
async def test_a_block_of_another_length_is_refused(node: Node, way: str) -> None:
    numbers = fresh(1)
    async with connected(node.rpc_address, way) as (client, transfer, store):
        local = filled(transfer, 2 * BLOCK)
        await client.put(store, *chain_of(local, numbers, BLOCK))
        for length in (BLOCK // 2, 2 * BLOCK):
            for _ in range(2):
                _, other = chain_of(local, numbers, length, pieces=PIECES)
                with pytest.raises(InvalidRequest, match=f"{length} bytes"):
                    await read(client, store, numbers, other)


@ways
async def test_objects_only_on_disk_are_read_under_a_lease(way: str, tmp_path: os.PathLike[str]) -> None:
    with running_node("--dram", "4MiB", "--ssd", f"{tmp_path}:64MiB") as own:
        async with connected(own.rpc_address, way) as (client, transfer, store):
            local = filled(transfer, 96 * BLOCK)
            objects, slots = chain_of(local, range(96), BLOCK, pieces=PIECES)

            async def put(places: range) -> bool | None:
                """Puts blocks; None while older blocks must first be written to disk."""
                some = objects[places.start : places.stop]
                result = await client.put(store, some, slots.at(places))
                return None if result.refused else True

            for first in range(0, 96, 16):
                await answered(partial(put, range(first, first + 16)))

            async def got(places: range) -> bool | None:
                """Reads blocks; None while there is too little memory to load all of them."""
                found = await read(client, store, places, slots.at(places))
                assert found == [objects[n].checksum for n in places][: len(found)]
                return len(found) == len(places) or None

            for first in range(0, 96, 4):
                await answered(partial(got, range(first, first + 4)))
            await until_stats(client, store, lambda s: s.leased_bytes == 0)


@ways
async def test_a_node_that_is_gone_is_peer_lost_and_its_successor_is_read(way: str) -> None:
    with running_node("--dram", str(DRAM)) as own, running_node("--dram", str(DRAM)) as successor:
        async with connected(own.rpc_address, way) as (client, transfer, store):
            local = filled(transfer, 2 * BLOCK)
            objects, slots = chain_of(local, range(2), BLOCK, pieces=2)
            await client.put(store, objects, slots)
            assert len(await read(client, store, range(2), slots)) == 2
            own.kill()
            with pytest.raises(PeerLost):
                await client.put(store, *chain_of(local, range(7, 8), BLOCK))
            with pytest.raises(PeerLost):
                await read(client, store, range(2), slots)
            later = await client.locate(successor.rpc_address, timeout_s=PATIENCE_S)
            assert later.instance_id == store.instance_id
            assert await read(client, later, range(2), slots) == []


@ways
async def test_a_cancelled_put_leaves_nothing_behind(node: Node, way: str) -> None:
    faults = FaultPlan()
    async with connected(node.rpc_address, way, faults=faults) as (client, transfer, store):
        local = filled(transfer, 96 * BLOCK)  # too large for one round trip
        objects, slots = chain_of(local, fresh(96), BLOCK, pieces=PIECES)
        faults.held = True
        put = asyncio.create_task(client.put(store, objects, slots))
        await until_stats(client, store, lambda s: s.reserved_bytes > 0)
        put.cancel()
        faults.held = False
        with pytest.raises(asyncio.CancelledError):
            await put
        transfer.deregister(local)  # raises if a transfer still uses it
        await until_stats(client, store, lambda s: s.reserved_bytes == 0)
