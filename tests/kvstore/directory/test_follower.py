"""A follower of a node that says what the test wants, over a real connection: gaps, inventories, restarts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvstore.directory import Directory
from kvstore.directory.follower import Follower
from protocol.ids import InstanceId
from protocol.keys import pack_keys
from protocol.pb import common_pb2, kvstore_pb2, kvstore_pb2_grpc
from protocol.process import running
from protocol.registry.base import Member
from protocol.request import Endpoint
from protocol.rpc import Channels, RpcServer
from tests.kvstore.nodes import TOKEN, key, within
from tests.patience import PATIENCE_S

A = InstanceId("a")


def events(
    added: list[int],
    *,
    seqs: tuple[int, int],
    removed: list[int] | None = None,
    epoch: int = 5,
    **more: Any,
) -> kvstore_pb2.StoreEvents:
    return kvstore_pb2.StoreEvents(
        epoch=epoch,
        first_seq=seqs[0],
        next_seq=seqs[1],
        added_keys=pack_keys([key(n) for n in added]),
        added_parents=bytes(16 * len(added)),
        added_tiers=bytes([kvstore_pb2.STORE_TIER_MEMORY]) * len(added),
        removed_keys=pack_keys([key(n) for n in removed or []]),
        **more,
    )


class ScriptedNode(kvstore_pb2_grpc.KvStoreServicer):
    """Each call to `Subscribe` is handed to the test, which sends messages, or None to end it."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[tuple[Any, asyncio.Queue[Any]]] = asyncio.Queue()

    async def Subscribe(self, request: Any, context: Any) -> AsyncIterator[Any]:
        messages: asyncio.Queue[Any] = asyncio.Queue()
        self.calls.put_nowait((request, messages))
        while (message := await messages.get()) is not None:
            yield message

    async def Stats(self, request: Any, context: Any) -> kvstore_pb2.StoreStatsReply:
        endpoint = common_pb2.Endpoint(instance_id=A, epoch=5)
        return kvstore_pb2.StoreStatsReply(endpoint=endpoint, free_bytes=7, capacity_bytes=9)

    async def Describe(self, request: Any, context: Any) -> kvstore_pb2.StoreDescribeReply:
        endpoint = common_pb2.Endpoint(instance_id=A, epoch=5, transfer_address="t")
        return kvstore_pb2.StoreDescribeReply(endpoint=endpoint, lean_address="lean")


class Scene:
    """A follower of a scripted node."""

    def __init__(self, node: ScriptedNode, follower: Follower, directory: Directory) -> None:
        self.node = node
        self.follower = follower
        self.directory = directory
        self.counters: Counter[str] = Counter()
        self.reads: list[bytes] = []

    async def subscribed(self) -> tuple[Any, asyncio.Queue[Any]]:
        return await within(PATIENCE_S, self.node.calls.get())

    async def until_held(self, *numbers: int) -> None:
        async def poll() -> None:
            while self._held() != set(numbers):  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(0.005)

        await within(PATIENCE_S, poll())
        self.directory.validate()

    def _held(self) -> set[int]:
        return {n for n in range(20) if self.directory.holders(key(n))}


@contextlib.asynccontextmanager
async def following(directory: Directory) -> AsyncIterator[Scene]:
    server, channels, node = RpcServer(TOKEN), Channels(TOKEN), ScriptedNode()
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(node, server.grpc)
    address = await server.start("127.0.0.1", 0)
    endpoint = Endpoint(instance_id=A, epoch=1, rpc_address=address, transfer_address="", host="h")
    reads: list[bytes] = []
    counters: Counter[str] = Counter()
    follower = Follower(
        Member(endpoint=endpoint, role="store", owner="o"),
        directory,
        channels,
        counters,
        reads.append,
        asyncio.get_running_loop().time,
    )
    scene = Scene(node, follower, directory)
    scene.counters, scene.reads = counters, reads
    try:
        async with running(follower.run()):
            yield scene
    finally:
        await channels.close()
        await server.stop(0)


async def test_an_inventory_in_pieces_then_events_are_taken_in_and_reads_handed_on() -> None:
    async with following(Directory()) as scene:
        request, node = await scene.subscribed()
        assert (request.epoch, request.next_seq) == (0, 0)
        node.put_nowait(events([1, 2], seqs=(9, 9), snapshot=True, more=True))
        await scene.until_held(1, 2)
        assert not scene.follower.in_step
        node.put_nowait(events([3], seqs=(9, 9)))
        node.put_nowait(events([4], seqs=(9, 11), removed=[1], read_keys=key(2) * 2))
        await scene.until_held(2, 3, 4)
        assert scene.follower.in_step
        assert b"".join(scene.reads) == key(2) * 2


async def test_a_gap_makes_it_ask_for_everything_again() -> None:
    async with following(Directory()) as scene:
        _, node = await scene.subscribed()
        node.put_nowait(events([1], seqs=(3, 3), snapshot=True))
        node.put_nowait(events([2], seqs=(5, 6)))
        request, node = await scene.subscribed()
        assert (request.epoch, request.next_seq) == (0, 0)
        assert scene.counters["gaps"] == 1
        await scene.until_held(1)
        assert not scene.follower.in_step
        node.put_nowait(events([7], seqs=(8, 8), snapshot=True))
        await scene.until_held(7)


async def test_after_a_broken_connection_it_goes_on_where_it_was() -> None:
    async with following(Directory()) as scene:
        _, node = await scene.subscribed()
        node.put_nowait(events([1], seqs=(3, 3), snapshot=True))
        await scene.until_held(1)
        node.put_nowait(None)
        request, node = await scene.subscribed()
        assert (request.epoch, request.next_seq) == (5, 3)
        node.put_nowait(events([2], seqs=(3, 4)))
        await scene.until_held(1, 2)


async def test_a_connection_that_broke_within_an_inventory_makes_it_ask_for_everything() -> None:
    async with following(Directory()) as scene:
        _, node = await scene.subscribed()
        node.put_nowait(events([1], seqs=(3, 3), snapshot=True, more=True))
        await scene.until_held(1)
        node.put_nowait(None)
        request, _ = await scene.subscribed()
        assert (request.epoch, request.next_seq) == (0, 0)


@pytest.mark.parametrize("epoch", [6, 4])
async def test_another_incarnation_replaces_the_one_before_also_with_a_clock_set_back(
    epoch: int,
) -> None:
    async with following(Directory()) as scene:
        _, node = await scene.subscribed()
        node.put_nowait(events([1, 2], seqs=(30, 30), snapshot=True))
        await scene.until_held(1, 2)
        node.put_nowait(None)
        _, node = await scene.subscribed()
        node.put_nowait(events([2, 3], seqs=(1, 1), snapshot=True, epoch=epoch))
        await scene.until_held(2, 3)


async def test_events_of_another_incarnation_without_an_inventory_are_a_gap() -> None:
    async with following(Directory()) as scene:
        _, node = await scene.subscribed()
        node.put_nowait(events([1], seqs=(1, 1), snapshot=True))
        await scene.until_held(1)
        node.put_nowait(events([2], seqs=(1, 2), epoch=6))
        request, _ = await scene.subscribed()
        assert request.epoch == 0
        await scene.until_held(1)


async def test_a_message_that_contradicts_itself_is_not_taken_in() -> None:
    async with following(Directory()) as scene:
        _, node = await scene.subscribed()
        node.put_nowait(events([1], seqs=(1, 1), snapshot=True))
        node.put_nowait(events([], seqs=(1, 2), removed=[1]))
        await scene.until_held()
        broken = events([2], seqs=(2, 3))
        broken.added_keys = broken.added_keys[:15]
        node.put_nowait(broken)
        request, node = await scene.subscribed()
        assert request.next_seq == 0
        node.put_nowait(events([4], seqs=(3, 3), snapshot=True))
        await scene.until_held(4)


async def test_what_a_node_says_of_itself_is_its_view() -> None:
    async with following(Directory()) as scene:
        _, node = await scene.subscribed()
        node.put_nowait(events([], seqs=(1, 1), snapshot=True))

        async def described() -> None:
            while not scene.follower.view().in_step:  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(0.005)

        await within(PATIENCE_S, described())
        view = scene.follower.view()
        assert (view.host, view.free_bytes, view.capacity_bytes) == ("h", 7, 9)
        endpoint = scene.follower.endpoint
        assert endpoint is not None
        assert endpoint.transfer_address == "t"
        assert endpoint.rpc_address == scene.follower.rpc_address
