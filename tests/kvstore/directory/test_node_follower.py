"""Follows a scripted node over a real connection: gaps, inventories and restarts."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from moonserve.kvstore.directory import Directory
from moonserve.kvstore.directory.node_follower import SILENCE_S, NodeFollower
from moonserve.protocol.kv_blocks import pack_keys
from moonserve.protocol.membership.registry import Member
from moonserve.protocol.pb import common_pb2, kvstore_pb2, kvstore_pb2_grpc
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.request import Endpoint, InstanceId
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from tests.kvstore.node.nodes import TOKEN, key
from tests.patience import PATIENCE_S, came_true

A = InstanceId("a")


def events(
    added: list[int], *, seqs: tuple[int, int], removed: list[int] | None = None, epoch: int = 5, **more: Any
) -> kvstore_pb2.StoreEvents:
    return kvstore_pb2.StoreEvents(
        epoch=epoch,
        first_seq=seqs[0],
        next_seq=seqs[1],
        added_keys=pack_keys([key(n) for n in added]),
        added_parents=bytes(16 * len(added)),
        removed_keys=pack_keys([key(n) for n in removed or []]),
        **more,
    )


class Scene(kvstore_pb2_grpc.KvStoreServicer):
    """A scripted node and its follower. The test takes each `Subscribe` call and sends messages, or None to end it."""

    follower: NodeFollower

    def __init__(self) -> None:
        self.calls: asyncio.Queue[tuple[Any, asyncio.Queue[Any]]] = asyncio.Queue()
        self.directory = Directory()
        self.counters: Counter[str] = Counter()
        self.reads: list[bytes] = []
        self.ahead_s = 0.0

    async def Subscribe(self, request: Any, context: Any) -> AsyncIterator[Any]:
        messages: asyncio.Queue[Any] = asyncio.Queue()
        self.calls.put_nowait((request, messages))
        while (message := await messages.get()) is not None:
            yield message

    async def Stats(self, request: Any, context: Any) -> kvstore_pb2.StoreStatsReply:
        endpoint = common_pb2.Endpoint(instance_id=A, epoch=5, transfer_address="t")
        return kvstore_pb2.StoreStatsReply(endpoint=endpoint, free_bytes=7, capacity_bytes=9)

    def follow(self, channels: Channels, address: str) -> None:
        loop = asyncio.get_running_loop()
        endpoint = Endpoint(instance_id=A, epoch=1, rpc_address=address, transfer_address="", host="h")
        self.follower = NodeFollower(
            Member(endpoint=endpoint, role="store", owner="o"),
            self.directory,
            channels,
            self.counters,
            self.reads.append,
            lambda: loop.time() + self.ahead_s,
        )

    async def asked(self, epoch: int, next_seq: int) -> asyncio.Queue[Any]:
        """Waits for a subscription from this position. Returns the queue of messages to send to it."""
        request, messages = await asyncio.wait_for(self.calls.get(), PATIENCE_S)
        assert (request.epoch, request.next_seq) == (epoch, next_seq)
        return messages

    async def until_held(self, numbers: set[int]) -> None:
        await came_true(lambda: {n for n in range(20) if self.directory.holders(key(n))} == numbers)
        self.directory.validate()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    server, scene = RpcServer(TOKEN), Scene()
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(scene, server.grpc)
    async with server.serving("127.0.0.1", 0, 0) as address, Channels(TOKEN) as channels:
        scene.follow(channels, address)
        async with background_task(scene.follower.run()):
            yield scene


EVERYTHING = (0, 0)
BROKEN = events([2], seqs=(2, 3))
BROKEN.added_keys = BROKEN.added_keys[:15]
Step = tuple[int, int] | kvstore_pb2.StoreEvents | set[int] | None
"""Expected start of a subscription, a message of the node, the keys then known, or None: the connection breaks."""
FIRST = events([1], seqs=(3, 3), snapshot=True)
RENEWED = events([7], seqs=(8, 8), snapshot=True)
BEGUN = events([1], seqs=(3, 3), snapshot=True, more=True)
FAR = events([1, 2], seqs=(30, 30), snapshot=True)
SCENES: dict[str, list[Step]] = {
    "a gap makes it ask for everything again": [
        *(EVERYTHING, FIRST, events([2], seqs=(5, 6)), EVERYTHING, {1}, RENEWED, {7})
    ],
    "after a broken connection it goes on where it was": [
        *(EVERYTHING, FIRST, {1}, None, (5, 3), events([2], seqs=(3, 4)), {1, 2})
    ],
    "a connection that broke within an inventory asks for everything": [*(EVERYTHING, BEGUN, {1}, None, EVERYTHING)],
    "a later incarnation replaces this one": [
        *(EVERYTHING, FAR, {1, 2}, None, (5, 30), events([2, 3], seqs=(1, 1), snapshot=True, epoch=6), {2, 3})
    ],
    "so does one whose clock was set back": [
        *(EVERYTHING, FAR, {1, 2}, None, (5, 30), events([2, 3], seqs=(1, 1), snapshot=True, epoch=4), {2, 3})
    ],
    "events of another incarnation without an inventory are a gap": [
        *(EVERYTHING, FIRST, {1}, events([2], seqs=(3, 4), epoch=6), EVERYTHING, {1})
    ],
    "a message that contradicts itself is not taken in": [
        *(EVERYTHING, events([1], seqs=(1, 1), snapshot=True), events([], seqs=(1, 2), removed=[1]), set()),
        *(BROKEN, EVERYTHING, events([4], seqs=(3, 3), snapshot=True), {4}),
    ],
}


@pytest.mark.parametrize("steps", SCENES.values(), ids=SCENES)
async def test_the_directory_follows_the_events_of_a_node(scene: Scene, steps: list[Step]) -> None:
    messages: asyncio.Queue[Any] = asyncio.Queue()
    for step in steps:
        if isinstance(step, tuple):
            messages = await scene.asked(*step)
        elif isinstance(step, set):
            await scene.until_held(step)
        else:
            messages.put_nowait(step)


async def test_an_inventory_in_pieces_then_events_are_taken_in_and_reads_handed_on(scene: Scene) -> None:
    node = await scene.asked(*EVERYTHING)
    node.put_nowait(events([1, 2], seqs=(9, 9), snapshot=True, more=True))
    await scene.until_held({1, 2})
    assert not scene.follower.in_step
    node.put_nowait(events([3], seqs=(9, 9)))
    node.put_nowait(events([4], seqs=(9, 11), removed=[1], read_keys=key(2) * 2))
    await scene.until_held({2, 3, 4})
    assert scene.follower.in_step
    assert b"".join(scene.reads) == key(2) * 2
    assert scene.counters["gaps"] == 0
    scene.ahead_s = SILENCE_S
    assert not scene.follower.in_step, "it has been silent for long"
    node.put_nowait(events([5], seqs=(11, 12)))
    await scene.until_held({2, 3, 4, 5})
    assert scene.follower.in_step
    node.put_nowait(events([6], seqs=(14, 15)))
    await scene.asked(*EVERYTHING)
    assert scene.counters["gaps"] == 1


async def test_a_node_view_has_what_the_node_reports(scene: Scene) -> None:
    node = await scene.asked(*EVERYTHING)
    node.put_nowait(events([], seqs=(1, 1), snapshot=True))
    await came_true(lambda: scene.follower.view().in_step)
    view, endpoint = scene.follower.view(), scene.follower.endpoint
    assert (view.host, view.free_bytes, view.capacity_bytes) == ("h", 7, 9)
    assert endpoint is not None
    assert endpoint.transfer_address == "t"
    assert endpoint.rpc_address == scene.follower.rpc_address
