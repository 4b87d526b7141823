"""A real node process, real sockets and both transports: what goes in comes out, or it is said why not."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from kvstore.client import plain_key
from kvstore.objects import PutObject, ReadLease
from protocol.checksum import checksum
from protocol.errors import (
    IntegrityError,
    InvalidRequest,
    MoonserveError,
    Overloaded,
    PeerLost,
    StaleLease,
    Unauthenticated,
)
from protocol.pb import kvstore_pb2, kvstore_pb2_grpc
from protocol.rpc import Channels
from tests.kvstore.nodes import (
    TOKEN,
    UNIT,
    Node,
    chain_of,
    connected,
    key,
    running_node,
    until_stats,
    within,
)
from tests.patience import PATIENCE_S
from tests.stopping import stop
from transfer import FaultPlan, Op, RemoteSegment, Transfer
from transfer.patience import Patience

DRAM = 4 * 2**20
BLOCK = 64 * 1024
both_transports = pytest.mark.parametrize("transport", ["shm", "tcp"])


@pytest.fixture(scope="module")
def shared_node() -> Iterator[Node]:
    """For tests that leave no trace but objects of their own."""
    with running_node("--dram", str(DRAM)) as node:
        yield node


@pytest.fixture
def own_node() -> Iterator[Node]:
    """For tests that fill, damage or kill it; it never evicts ahead of need."""
    with running_node("--dram", str(DRAM), "--evict-above", "1", "--evict-share", "0") as node:
        yield node


@both_transports
async def test_a_chain_put_in_pieces_is_read_back_whole(shared_node: Node, transport: str) -> None:
    numbers = range(10, 16) if transport == "shm" else range(20, 26)
    async with connected(shared_node.rpc_address, transport) as (client, transfer, store):
        local = transfer.allocate(6 * BLOCK)
        local.buffer[:] = os.urandom(local.nbytes)
        before = bytes(local.buffer)
        objects = chain_of(local, numbers, BLOCK, pieces=8)
        result = await client.put(store, objects, local)
        assert (result.stored, result.present, result.refused, result.corrupt) == (6, 0, 0, ())
        again = await client.put(store, objects, local)
        assert (again.stored, again.present) == (0, 6)

        local.buffer[:] = bytes(local.nbytes)
        lease = await client.lease(store, [key(n) for n in (*numbers, 999)])
        assert [stored.length for stored in lease.objects] == [BLOCK] * 6
        places = [wish.pieces for wish in objects]
        assert await client.read(lease, local, places, deadline_s=PATIENCE_S) == 6
        assert local.buffer == before
        await client.release(lease)
        stats = await client.stats(store)
        assert stats.leased_bytes == stats.reserved_bytes == 0


@both_transports
@pytest.mark.parametrize("length", [0, 1, 1000, 3 * 2**20])
async def test_a_plain_value_of_any_size_comes_back(
    shared_node: Node, transport: str, length: int
) -> None:
    async with connected(shared_node.rpc_address, transport) as (client, _, store):
        name, value = f"{transport}-{length}".encode(), os.urandom(length)
        assert await client.get(store, name) is None
        await client.put_bytes(store, name, value)
        assert await client.get(store, name) == value
        await client.put_bytes(store, name, value)
        assert await client.exists(store, [plain_key(name), key(0)]) == [True, False]
        assert await client.remove(store, [plain_key(name)]) == 1
        assert await client.get(store, name) is None


async def test_a_value_that_may_take_long_is_read_under_a_lease_that_lasts(
    shared_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(shared_node.rpc_address, "tcp") as (client, _, store):
        value = os.urandom(100)
        await client.put_bytes(store, b"large", value)
        renewed: list[float] = []
        renew = client.renew

        async def noted(lease: ReadLease, *, ttl_s: float = 10.0) -> ReadLease:
            renewed.append(ttl_s)
            return await renew(lease, ttl_s=ttl_s)

        monkeypatch.setattr(client, "renew", noted)
        assert await client.get(store, b"large") == value
        assert not renewed
        crawling = Patience(base_s=10.0, slowest_bytes_s=1.0)
        monkeypatch.setattr("tests.kvstore.plain_client.PATIENCE", crawling)
        assert await client.get(store, b"large") == value
        assert [round(ttl_s) for ttl_s in renewed] == [115]


async def test_another_value_under_the_same_key_is_refused(shared_node: Node) -> None:
    async with connected(shared_node.rpc_address) as (client, _, store):
        await client.put_bytes(store, b"fixed", b"one")
        with pytest.raises(InvalidRequest, match="another value"):
            await client.put_bytes(store, b"fixed", b"two")
        assert await client.get(store, b"fixed") == b"one"


async def test_concurrent_writers_of_one_key_both_succeed_and_one_stores(shared_node: Node) -> None:
    async with connected(shared_node.rpc_address) as (client, _, store):
        value = os.urandom(2**20)
        before = (await client.stats(store)).counters["objects_stored"]
        puts = [client.put_bytes(store, b"contended", value) for _ in range(8)]
        await within(PATIENCE_S, asyncio.gather(*puts))
        assert await client.get(store, b"contended") == value
        assert (await client.stats(store)).counters["objects_stored"] == before + 1


async def test_a_value_larger_than_the_segment_is_refused_with_both_sizes(own_node: Node) -> None:
    async with connected(own_node.rpc_address) as (client, _, store):
        await client.put_bytes(store, b"small", b"stays")
        with pytest.raises(InvalidRequest, match=f"{DRAM + 1} bytes .* {DRAM} bytes"):
            await client.put_bytes(store, b"large", bytes(DRAM + 1))
        assert await client.get(store, b"small") == b"stays"
        await client.put_bytes(store, b"exact", bytes(DRAM))  # evicts the small one
        assert await client.get(store, b"exact") == bytes(DRAM)


async def test_a_key_over_the_limit_is_refused(shared_node: Node) -> None:
    async with connected(shared_node.rpc_address) as (client, _, store):
        with pytest.raises(InvalidRequest, match="65536"):
            await client.get(store, bytes(65537))


async def test_a_full_store_evicts_tails_and_refuses_only_when_all_is_leased(
    own_node: Node,
) -> None:
    async with connected(own_node.rpc_address) as (client, transfer, store):
        count = DRAM // BLOCK
        local = transfer.allocate(DRAM)
        chain = chain_of(local, range(1000, 1000 + count), BLOCK)
        assert (await client.put(store, chain, local)).stored == count
        await client.put_bytes(store, b"newcomer", bytes(2 * BLOCK))
        lease = await client.lease(store, [wish.key for wish in chain])
        assert len(lease.objects) == count - 2
        value_lease = await client.lease(store, [plain_key(b"newcomer")])
        with pytest.raises(Overloaded):
            await client.put_bytes(store, b"too much", b"x")
        await client.release(lease)
        await client.put_bytes(store, b"fits again", b"x")
        await client.release(value_lease)
        stats = await client.stats(store)
        assert stats.counters["evictions_succeeded"] == 3
        total = stats.free_bytes + stats.held_bytes + stats.leased_bytes + stats.reserved_bytes
        assert total == stats.capacity_bytes == DRAM


@both_transports
async def test_a_byte_that_rots_in_the_node_is_found_dropped_and_counted(
    own_node: Node, transport: str
) -> None:
    async with connected(own_node.rpc_address, transport) as (client, transfer, store):
        local = transfer.allocate(4 * BLOCK)
        objects = chain_of(local, range(4), BLOCK)
        await client.put(store, objects, local)
        lease = await client.lease(store, [wish.key for wish in objects])
        own_node.flip_byte(lease.objects[2].offset + 17, DRAM)
        places = [wish.pieces for wish in objects]
        assert await client.read(lease, local, places, deadline_s=PATIENCE_S) == 2
        await client.release(lease)
        assert await client.exists(store, [w.key for w in objects]) == [True, True, False, True]
        assert (await client.stats(store)).counters["integrity_failures"] == 1

        await client.put_bytes(store, b"value", b"precious")
        lease = await client.lease(store, [plain_key(b"value")])
        own_node.flip_byte(lease.objects[0].offset, DRAM)
        with pytest.raises(IntegrityError):
            await client.get(store, b"value")
        await client.release(lease)
        assert await client.get(store, b"value") is None


async def test_a_byte_that_flips_on_the_way_in_is_never_visible(shared_node: Node) -> None:
    faults = FaultPlan(corrupt_writes=1)
    async with connected(shared_node.rpc_address, faults=faults) as (client, transfer, store):
        local = transfer.allocate(2 * BLOCK)
        objects = chain_of(local, range(300, 302), BLOCK)
        result = await client.put(store, objects, local)
        assert (result.stored, len(result.corrupt)) == (1, 1)
        present = await client.exists(store, [wish.key for wish in objects])
        assert present == [wish.key not in result.corrupt for wish in objects]
        assert (await client.put(store, objects, local)).stored == 1


async def test_a_lost_lease_is_not_mistaken_for_corruption(shared_node: Node) -> None:
    async with connected(shared_node.rpc_address) as (client, transfer, store):
        local = transfer.allocate(BLOCK)
        [wish] = chain_of(local, range(600, 601), BLOCK)
        await client.put(store, [wish], local)
        lease = await client.lease(store, [wish.key])
        await client.release(lease)
        shared_node.flip_byte(lease.objects[0].offset, DRAM)
        with pytest.raises(StaleLease):
            await client.read(lease, local, [wish.pieces], deadline_s=PATIENCE_S)
        assert await client.exists(store, [wish.key]) == [True]


class Raw:
    """Calls of a writer that misbehaves."""

    def __init__(self, rpc_address: str) -> None:
        self._channels = Channels(TOKEN)
        self.stub = kvstore_pb2_grpc.KvStoreStub(self._channels.to(rpc_address))

    async def __aenter__(self) -> Raw:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channels.close()

    async def reserve(
        self, name: str, ttl_s: float, number: int, length: int = BLOCK
    ) -> kvstore_pb2.StoreReserveReply:
        request = kvstore_pb2.StoreReserveRequest(reservation_id=name, ttl_s=ttl_s)
        request.wishes.add(key=key(number), length=length)
        reply = await self._channels.call(self.stub.Reserve, request, timeout_s=PATIENCE_S)
        assert isinstance(reply, kvstore_pb2.StoreReserveReply)
        return reply

    async def commit(self, name: str, number: int, digest: int) -> list[bytes]:
        request = kvstore_pb2.StoreCommitRequest(
            reservation_id=name, keys=[key(number)], checksums=[digest]
        )
        reply = await self._channels.call(self.stub.Commit, request, timeout_s=PATIENCE_S)
        return list(reply.corrupt)


async def test_an_abandoned_reservation_is_reclaimed_and_its_late_writer_shut_out(
    shared_node: Node,
) -> None:
    async with (
        connected(shared_node.rpc_address) as (client, transfer, store),
        Raw(shared_node.rpc_address) as raw,
    ):
        reply = await raw.reserve("abandoned", 0.1, 801)
        await until_stats(client, store, lambda s: s.reserved_bytes == 0)
        with pytest.raises(StaleLease):
            await raw.commit("abandoned", 801, 0)
        local = transfer.allocate(BLOCK)
        remote = RemoteSegment(store.transfer_address, reply.segment_id)
        late = Transfer(Op.WRITE, local, 0, remote, reply.slots[0].offset, BLOCK, reply.window_id)
        with pytest.raises(StaleLease):
            await transfer.submit([late], deadline_s=PATIENCE_S)
        assert (await client.put(store, chain_of(local, range(801, 802), BLOCK), local)).stored == 1


async def test_a_commit_is_idempotent_and_closes_the_window(shared_node: Node) -> None:
    async with (
        connected(shared_node.rpc_address) as (client, transfer, store),
        Raw(shared_node.rpc_address) as raw,
    ):
        reply = await raw.reserve("twice", 30.0, 400)
        assert await raw.reserve("twice", 30.0, 400) == reply
        local = transfer.allocate(BLOCK)
        remote = RemoteSegment(store.transfer_address, reply.segment_id)
        write = Transfer(Op.WRITE, local, 0, remote, reply.slots[0].offset, BLOCK, reply.window_id)
        await transfer.submit([write], deadline_s=PATIENCE_S)
        digest = checksum([local.buffer])
        commits = [raw.commit("twice", 400, digest) for _ in range(3)]
        assert await asyncio.gather(*commits) == [[], [], []]
        with pytest.raises(StaleLease):
            await transfer.submit([write], deadline_s=PATIENCE_S)
        assert await client.exists(store, [key(400)]) == [True]


async def test_a_waiting_writer_is_answered_when_the_other_gives_up(shared_node: Node) -> None:
    async with (
        connected(shared_node.rpc_address) as (client, _, store),
        Raw(shared_node.rpc_address) as raw,
    ):
        name = plain_key(b"waited for")
        await raw.reserve("slow", 0.3, int.from_bytes(name, "little"), UNIT)
        await within(
            PATIENCE_S, client.put_bytes(store, b"waited for", b"v", deadline_s=PATIENCE_S)
        )
        assert await client.get(store, b"waited for") == b"v"


async def test_cancelled_operations_leave_no_right_behind(shared_node: Node) -> None:
    faults = FaultPlan()
    async with connected(shared_node.rpc_address, faults=faults) as (client, transfer, store):
        local = transfer.allocate(BLOCK)
        objects = chain_of(local, range(700, 701), BLOCK)
        faults.held = True
        put = asyncio.create_task(client.put(store, objects, local))
        await until_stats(client, store, lambda s: s.reserved_bytes > 0)
        put.cancel()
        faults.held = False
        with pytest.raises(asyncio.CancelledError):
            await put
        transfer.deregister(local)  # refused while a transfer still used it
        await until_stats(client, store, lambda s: s.reserved_bytes == 0)

        await client.put_bytes(store, b"cancelled", b"v")
        faults.held = True
        get = asyncio.create_task(client.get(store, b"cancelled"))
        await until_stats(client, store, lambda s: s.leased_bytes > 0)
        get.cancel()
        faults.held = False
        with pytest.raises(asyncio.CancelledError):
            await get
        await until_stats(client, store, lambda s: s.leased_bytes == 0)


@both_transports
async def test_a_node_killed_during_a_get_is_lost_within_the_deadline(
    own_node: Node, transport: str
) -> None:
    faults = FaultPlan()
    async with connected(own_node.rpc_address, transport, faults=faults) as (client, _, store):
        await client.put_bytes(store, b"k", bytes(2**20))
        faults.held = True  # the kill falls between lease and read
        get = asyncio.create_task(client.get(store, b"k", deadline_s=PATIENCE_S))
        await until_stats(client, store, lambda s: s.leased_bytes > 0)
        own_node.kill()
        faults.held = False
        with pytest.raises(PeerLost):
            await within(PATIENCE_S, get)
        with pytest.raises(PeerLost):
            await client.get(store, b"k", deadline_s=1.0)


async def test_a_node_that_hangs_costs_no_more_than_the_deadline(own_node: Node) -> None:
    async with connected(own_node.rpc_address) as (client, transfer, store):
        await client.put_bytes(store, b"k", b"v")
        local = transfer.allocate(BLOCK)
        stop(own_node.process.pid)
        try:
            with pytest.raises(PeerLost):
                await within(PATIENCE_S, client.get(store, b"k", deadline_s=0.3))
            with pytest.raises(PeerLost):
                await within(
                    3.0, client.put(store, chain_of(local, range(1), BLOCK), local, deadline_s=0.3)
                )
        finally:
            own_node.process.send_signal(signal.SIGCONT)
        assert await client.get(store, b"k") == b"v"
        await until_stats(client, store, lambda s: s.leased_bytes == s.reserved_bytes == 0)


async def test_strangers_and_malformed_calls_are_refused(shared_node: Node) -> None:
    async with connected(shared_node.rpc_address) as (client, transfer, store):
        loop = PutObject(key=key(1), parent=key(1), checksum=0, pieces=[(0, 1)])
        with pytest.raises(InvalidRequest, match="own parent"):
            await client.put(store, [loop], transfer.allocate(1))
        with pytest.raises(InvalidRequest, match="16 bytes"):
            await client.exists(store, [b"short"])  # type: ignore[list-item]
        with pytest.raises(InvalidRequest, match="ttl_s"):
            await client.lease(store, [key(1)], ttl_s=1e9)
    channels = Channels("wrong")
    stub = kvstore_pb2_grpc.KvStoreStub(channels.to(shared_node.rpc_address))
    with pytest.raises(MoonserveError) as caught:
        await channels.call(stub.Stats, kvstore_pb2.StoreStatsRequest(), timeout_s=PATIENCE_S)
    assert isinstance(caught.value, Unauthenticated)
    await channels.close()
