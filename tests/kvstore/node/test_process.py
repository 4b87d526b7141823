"""A real node process: its guarantees for writers and readers, also misbehaving ones. client/ tests the transports."""

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from moonserve.conductor.placement.admission import Limits
from moonserve.conductor.placement.policies import PUBLISHED_POLICY, make_policy
from moonserve.conductor.service import ConductorMetrics, ConductorService
from moonserve.conductor.state import ConductorState
from moonserve.kvstore.client.blocks import BlockStores
from moonserve.kvstore.node.remove_pin_drain import DrainMark
from moonserve.protocol.errors import DeadlineExceeded, PeerLost, StaleLease
from moonserve.protocol.kv_blocks import checksum
from moonserve.protocol.pb import conductor_pb2_grpc, kvstore_pb2
from moonserve.protocol.pb.kvstore_pb2 import StoreReserveReply
from moonserve.protocol.request import Endpoint, Role
from moonserve.protocol.rpc.grpc_transport import RpcServer
from moonserve.transfer import FaultPlan, Op, RemoteSegment, Segment, Transfer
from tests.kvstore.node.nodes import TOKEN, Node, chain_of, connected, exists, key, remove, running_node, until_stats
from tests.patience import PATIENCE_S, answered
from tests.stopping import stopped

DRAM = 4 * 2**20
BLOCK = 64 * 1024


async def test_a_byte_that_flips_on_the_way_in_is_never_visible(node: Node) -> None:
    faults = FaultPlan(corrupt_writes=1)
    async with connected(node.rpc_address, faults=faults) as (client, transfer, store):
        local = transfer.allocate(2 * BLOCK)
        objects, slots = chain_of(local, range(300, 302), BLOCK)
        result = await client.put(store, objects, slots)
        assert (result.stored, len(result.corrupt)) == (1, 1)
        present = await exists(client, store, [wish.key for wish in objects])
        assert present == [wish.key not in result.corrupt for wish in objects]
        assert (await client.put(store, objects, slots)).stored == 1


async def test_a_lost_lease_is_not_mistaken_for_corruption(node: Node) -> None:
    async with connected(node.rpc_address) as (client, transfer, store):
        local = transfer.allocate(BLOCK)
        [wish], slots = chain_of(local, range(600, 601), BLOCK)
        await client.put(store, [wish], slots)
        lease = await client.lease(store, [wish.key])
        await client.release_soon(lease)
        node.flip_byte(lease.objects[0].offset, DRAM)
        with pytest.raises(StaleLease):
            await client.read_leased(lease, slots, deadline_s=PATIENCE_S)
        assert await exists(client, store, [wish.key]) == [True]


async def reserve(client: BlockStores, store: Endpoint, name: str, ttl_s: float, number: int) -> StoreReserveReply:
    """Reserves space for one object by a raw call, so that a test can misbehave afterwards."""
    request = kvstore_pb2.StoreReserveRequest(reservation_id=name, ttl_s=ttl_s)
    request.wishes.add(key=key(number), length=BLOCK)
    reply: StoreReserveReply = await client.call(store, "Reserve", request, timeout_s=PATIENCE_S)
    return reply


async def commit(client: BlockStores, store: Endpoint, name: str, number: int, digest: int) -> list[bytes]:
    request = kvstore_pb2.StoreCommitRequest(reservation_id=name, keys=[key(number)], checksums=[digest])
    return list((await client.call(store, "Commit", request, timeout_s=PATIENCE_S)).corrupt)


def write_of(local: Segment, store: Endpoint, reserved: StoreReserveReply) -> Transfer:
    remote = RemoteSegment(store.transfer_address, reserved.segment_id)
    return Transfer(Op.WRITE, local, 0, remote, reserved.slots[0].offset, BLOCK, reserved.window_id)


async def test_an_abandoned_reservation_is_reclaimed_and_its_late_writer_shut_out(node: Node) -> None:
    async with connected(node.rpc_address) as (client, transfer, store):
        reserved = await reserve(client, store, "abandoned", 0.1, 801)
        await until_stats(client, store, lambda s: s.reserved_bytes == 0)
        with pytest.raises(StaleLease):
            await commit(client, store, "abandoned", 801, 0)
        local = transfer.allocate(BLOCK)
        with pytest.raises(StaleLease):
            await transfer.submit([write_of(local, store, reserved)], deadline_s=PATIENCE_S)
        assert (await client.put(store, *chain_of(local, range(801, 802), BLOCK))).stored == 1


async def test_a_commit_is_idempotent_and_closes_the_window(node: Node) -> None:
    async with connected(node.rpc_address) as (client, transfer, store):
        reserved = await reserve(client, store, "twice", 30.0, 400)
        assert await reserve(client, store, "twice", 30.0, 400) == reserved
        local = transfer.allocate(BLOCK)
        write = write_of(local, store, reserved)
        await transfer.submit([write], deadline_s=PATIENCE_S)
        commits = [commit(client, store, "twice", 400, checksum([local.buffer])) for _ in range(3)]
        assert await asyncio.gather(*commits) == [[], [], []]
        with pytest.raises(StaleLease):
            await transfer.submit([write], deadline_s=PATIENCE_S)
        assert await exists(client, store, [key(400)]) == [True]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("end", ["cancelled", "killed"])
async def test_a_read_that_ends_between_its_lease_and_its_bytes_leaves_no_lease(
    node: Node, transport: str, end: str
) -> None:
    faults = FaultPlan()
    with contextlib.ExitStack() as own:
        node = own.enter_context(running_node("--dram", str(DRAM))) if end == "killed" else node
        way = connected(node.rpc_address, transport, faults=faults, attaches=False)
        async with way as (client, transfer, store):
            [wish], slots = chain_of(transfer.allocate(BLOCK), range(700, 701), BLOCK)
            await client.put(store, [wish], slots)
            faults.held = True
            read = asyncio.create_task(client.read(store, [wish.key], slots, deadline_s=PATIENCE_S))
            await until_stats(client, store, lambda s: s.leased_bytes > 0)
            if end == "killed":
                node.kill()
            else:
                read.cancel()
            faults.held = False
            with pytest.raises(PeerLost if end == "killed" else asyncio.CancelledError):
                await read
            if end == "cancelled":
                await until_stats(client, store, lambda s: s.leased_bytes == 0)


async def test_a_node_that_hangs_costs_no_more_than_the_deadline(node: Node) -> None:
    async with connected(node.rpc_address) as (client, transfer, store):
        objects, slots = chain_of(transfer.allocate(BLOCK), range(1), BLOCK)
        await client.put(store, objects, slots)
        with stopped(node.process.pid):
            with pytest.raises(DeadlineExceeded):
                await client.lease(store, [key(0)], timeout_s=0.3)
            with pytest.raises((DeadlineExceeded, PeerLost)):
                await client.put(store, objects, slots, deadline_s=0.3)
        await until_stats(client, store, lambda s: s.leased_bytes == s.reserved_bytes == 0)


async def test_a_restarted_node_without_a_disk_announces_no_blocks() -> None:
    """A node announces its blocks to the conductor's service, which runs here; after a crash it announces none."""
    state = ConductorState(make_policy(PUBLISHED_POLICY, 1.25), Limits(heartbeat_interval_s=0.2))
    service, server = ConductorService(state, ConductorMetrics(CollectorRegistry())), RpcServer(TOKEN)
    conductor_pb2_grpc.add_ConductorServicer_to_server(service, server.grpc)

    async def known(num_blocks: int) -> Endpoint:
        """Waits until the only member is a store with `num_blocks` announced blocks. Returns its endpoint."""

        async def ask() -> list[Endpoint]:
            members = state.cluster(time.monotonic()).instances
            counts = [(each.role, each.indexed_blocks, each.load.held_blocks) for each in members]
            return [each.endpoint for each in members] if counts == [(Role.STORE, num_blocks, num_blocks)] else []

        [endpoint] = await answered(ask)
        return endpoint

    async with server.serving("127.0.0.1", 0, 0) as conductor:
        flags = ("--dram", "1MiB", "--conductor", conductor)
        with running_node(*flags) as node:
            async with connected(node.rpc_address) as (client, transfer, store):
                await client.put(store, *chain_of(transfer.allocate(4 * BLOCK), range(4), BLOCK))
                await known(4)
                await remove(client, store, [key(2)])
                first = await known(3)
            node.kill()
        with running_node(*flags):
            second = await known(0)
    assert second.epoch > first.epoch
    assert second.transfer_address != first.transfer_address
    state.validate()


async def test_requests_during_slow_write_are_queued_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, going_on = threading.Event(), threading.Event()
    touch = Path.touch

    def slow_touch(path: Path, *args: Any) -> None:
        begun.set()
        going_on.wait()
        touch(path, *args)

    monkeypatch.setattr(Path, "touch", slow_touch)
    mark = DrainMark(tmp_path)
    first = asyncio.create_task(mark.save(True))
    await asyncio.to_thread(begun.wait)
    second = asyncio.create_task(mark.save(False))
    await asyncio.wait({second}, timeout=0.05)  # ends early if it wrongly does not wait
    going_on.set()
    await asyncio.gather(first, second)
    assert not mark.is_set()


async def test_drain_mark_that_cannot_be_saved_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await DrainMark(tmp_path / "gone").save(True)
    assert "cannot be saved" in caplog.text
    await DrainMark(None).save(True)
    assert not DrainMark(None).is_set()
