"""RPCs to this project's processes that the store's client lacks. Each call opens its own connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from benchmarks.store.servers import TOKEN
from protocol.pb import directory_pb2, directory_pb2_grpc, kvstore_pb2, kvstore_pb2_grpc
from protocol.rpc import Channels

TIMEOUT_S = 60.0
T = TypeVar("T")


def node_stats(address: str) -> kvstore_pb2.StoreStatsReply:
    """Returns a node's statistics. Raises PeerLost."""

    async def ask(channels: Channels) -> kvstore_pb2.StoreStatsReply:
        stub = kvstore_pb2_grpc.KvStoreStub(channels.to(address))
        request = kvstore_pb2.StoreStatsRequest()
        return await channels.call(stub.Stats, request, timeout_s=TIMEOUT_S)

    return asyncio.run(_with_channels(ask))


def directory_view(address: str) -> directory_pb2.GetNodesReply:
    """Returns the directory's view of the nodes. Raises PeerLost."""

    async def ask(channels: Channels) -> directory_pb2.GetNodesReply:
        stub = directory_pb2_grpc.DirectoryStub(channels.to(address))
        request = directory_pb2.GetNodesRequest()
        return await channels.call(stub.GetNodes, request, timeout_s=TIMEOUT_S)

    return asyncio.run(_with_channels(ask))


async def _with_channels(ask: Callable[[Channels], Awaitable[T]]) -> T:
    channels = Channels(TOKEN)
    try:
        return await ask(channels)
    finally:
        await channels.close()
