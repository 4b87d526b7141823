"""The gateway's view of the cluster and its connections to workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import gateway.cluster.stream
import gateway.cluster.view
from gateway.cluster.view import Cluster
from protocol.errors import IntegrityError, MoonserveError, NoWorker, PeerLost
from protocol.ids import GatewayId
from protocol.pb import (
    common_pb2,
    conductor_pb2,
    conductor_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from protocol.request import Endpoint
from protocol.rpc import Channels, RpcServer
from tests.patience import NEVER_S, PATIENCE_S


class RecordingChannels(Channels):
    """Tells which channels were closed."""

    def __init__(self) -> None:
        super().__init__("token")
        self.forgotten: asyncio.Queue[str] = asyncio.Queue()

    async def forget(self, address: str) -> None:
        await super().forget(address)
        self.forgotten.put_nowait(address)


async def ignored(instance_id: str, batch: worker_pb2.EventBatch) -> None:
    """Nobody sends any."""


def endpoint(name: str, epoch: int, port: int) -> Endpoint:
    return Endpoint(
        instance_id=name,
        epoch=epoch,
        rpc_address=f"127.0.0.1:{port}",
        transfer_address="",
        host="h",
    )


async def test_a_replaced_incarnation_is_lost_at_once_and_its_own_channel_closed() -> None:
    channels, lost = RecordingChannels(), list[str]()
    cluster = Cluster(
        channels,
        "127.0.0.1:1",
        GatewayId("g"),
        on_batch=ignored,
        on_lost=lambda instance_id, error: lost.append(instance_id),
        on_view=lambda view: None,
        about=conductor_pb2.GatewayView,
    )
    assert cluster.listen(endpoint("d0", 1, 2))
    assert cluster.listen(endpoint("d1", 1, 3))
    assert cluster.listen(endpoint("d0", 1, 2))
    assert lost == []
    assert cluster.listen(endpoint("d0", 2, 4))
    assert lost == ["d0"]
    assert not cluster.listen(endpoint("d0", 1, 2))  # nothing that it still says counts
    async with asyncio.timeout(PATIENCE_S):
        assert await channels.forgotten.get() == "127.0.0.1:2"
    cluster.listen(endpoint("d1", 2, 3))  # at the same address, so that the channel stays
    cluster.listen(endpoint("d0", 3, 5))
    async with asyncio.timeout(PATIENCE_S):
        assert await channels.forgotten.get() == "127.0.0.1:4"
    assert lost == ["d0", "d1", "d0"]
    assert channels.forgotten.empty()
    await cluster.close()
    await channels.close()


class Hasty(worker_pb2_grpc.WorkerServicer):
    """Ends its first stream after a word, and the second one not. In between it gives the gateway up."""

    num_streams = 0

    async def Events(
        self, request: worker_pb2.EventsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.EventBatch]:
        self.num_streams += 1
        standing = worker_pb2.Standing(times_given_up=self.num_streams - 1)
        yield worker_pb2.EventBatch(standing=standing)
        if self.num_streams > 1:
            await asyncio.Event().wait()


async def test_what_begins_while_a_stream_is_broken_waits_until_it_is_open_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or it would be lost with what was missed before."""
    monkeypatch.setattr(gateway.cluster.stream, "_REOPEN_DELAY_S", NEVER_S)  # unless somebody waits
    monkeypatch.setattr(gateway.cluster.stream, "_SETTLED_WITHIN_S", NEVER_S)
    server, channels = RpcServer("token"), Channels("token")
    worker_pb2_grpc.add_WorkerServicer_to_server(Hasty(), server.grpc)
    _, _, port = (await server.start("127.0.0.1", 0)).rpartition(":")
    worker = endpoint("d0", 1, int(port))
    lost: asyncio.Queue[tuple[float, MoonserveError]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    cluster = Cluster(
        channels,
        "127.0.0.1:1",
        GatewayId("g"),
        on_batch=ignored,
        on_lost=lambda instance_id, error: lost.put_nowait((loop.time(), error)),
        on_view=lambda view: None,
        about=conductor_pb2.GatewayView,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            await cluster.until_heard([worker])  # it is not known yet
            cluster.listen(worker)
            broke_at, broke = await lost.get()
            assert isinstance(broke, PeerLost)
            assert cluster.open_since() == {}
            await cluster.until_heard([worker])
            _, missed = lost.get_nowait()
            assert isinstance(missed, IntegrityError)
            assert cluster.open_since()["d0", 1] > broke_at
            await server.stop(0)
            await lost.get()
            await cluster.until_heard([worker])  # that it cannot be opened is known, too
            assert cluster.open_since() == {}
    finally:
        await cluster.close()
        await channels.close()
        await server.stop(0)


class OneView(conductor_pb2_grpc.ConductorServicer):
    is_restarted = False  # and knows nobody yet

    async def GetCluster(
        self, request: conductor_pb2.GetClusterRequest, context: Any
    ) -> conductor_pb2.ClusterView:
        if self.is_restarted:
            return conductor_pb2.ClusterView()
        layout = common_pb2.KvLayout(block_size=32)
        return conductor_pb2.ClusterView(
            fingerprint="f", layout=layout, max_model_len=99, ready=True
        )


async def test_who_leaves_while_its_stream_is_broken_is_lost_once_more() -> None:
    """For requests that were placed with it after its stream had broken."""
    server, channels = RpcServer(""), Channels("")
    conductor_pb2_grpc.add_ConductorServicer_to_server(OneView(), server.grpc)
    lost: list[str] = []
    cluster = Cluster(
        channels,
        await server.start("127.0.0.1", 0),
        GatewayId("g"),
        on_batch=ignored,
        on_lost=lambda instance_id, error: lost.append(error.message),
        on_view=lambda view: None,
        about=conductor_pb2.GatewayView,
    )
    try:
        cluster.listen(endpoint("d0", 1, 1))
        await cluster.refresh()
        assert lost[-1] == "d0 left the cluster"
    finally:
        await cluster.close()
        await channels.close()
        await server.stop(0)


async def test_who_leaves_takes_nobodys_channel_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another worker, which has its address now."""
    monkeypatch.setattr(gateway.cluster.stream, "_REOPEN_DELAY_S", NEVER_S)
    server, channels = RpcServer("token"), RecordingChannels()
    conductor_pb2_grpc.add_ConductorServicer_to_server(OneView(), server.grpc)
    worker_pb2_grpc.add_WorkerServicer_to_server(Hasty(), server.grpc)
    address = await server.start("127.0.0.1", 0)
    port = int(address.rpartition(":")[2])
    lost: asyncio.Queue[str] = asyncio.Queue()
    cluster = Cluster(
        channels,
        address,
        GatewayId("g"),
        on_batch=ignored,
        on_lost=lambda instance_id, error: lost.put_nowait(instance_id),
        on_view=lambda view: None,
        about=conductor_pb2.GatewayView,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            cluster.listen(endpoint("d0", 1, port))
            assert await lost.get() == "d0"  # its stream broke
            cluster.listen(endpoint("d1", 1, port))
            assert await lost.get() == "d1"  # which speaks, and says what it has missed
            await cluster.refresh()
            assert await lost.get() == "d0"  # it is in no view
        assert channels.forgotten.empty()
    finally:
        await cluster.close()
        await channels.close()
        await server.stop(0)


async def test_who_is_alive_is_forgotten_without_a_conductor_and_the_models_facts_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So requests are taken, and wait, while no conductor leads, and those under way go on when it is back and knows
    nobody yet."""
    server, channels, conductor = RpcServer(""), Channels(""), OneView()
    conductor_pb2_grpc.add_ConductorServicer_to_server(conductor, server.grpc)
    cluster = Cluster(
        channels,
        await server.start("127.0.0.1", 0),
        GatewayId("g"),
        on_batch=ignored,
        on_lost=lambda instance_id, error: None,
        on_view=lambda view: None,
        about=conductor_pb2.GatewayView,
    )
    try:
        with pytest.raises(NoWorker):
            cluster.facts()
        await cluster.refresh()
        assert cluster.is_ready
        monkeypatch.setattr(gateway.cluster.view, "_VIEW_LIFETIME_S", 0.0)
        assert not cluster.is_ready
        assert cluster.facts().max_model_len == 99
        conductor.is_restarted = True
        await cluster.refresh()
        assert cluster.facts().max_model_len == 99
    finally:
        await cluster.close()
        await channels.close()
        await server.stop(0)
