"""Tests of streams: over sockets once the address is known, in order, ended by either side, with backpressure."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from moonserve.protocol.errors import MoonserveError, PeerLost, StaleLease
from moonserve.protocol.pb import kvstore_pb2, kvstore_pb2_grpc
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from tests.patience import PATIENCE_S
from tests.protocol.rpc.scripted import EXISTS, TOKEN, ScriptedStore

LARGE, NUM_LARGE = bytes(1 << 20), 64


class Lister(ScriptedStore):
    """`List` sends the items of `scripted`: a key, an error to raise, None to end. Over gRPC it sends one key."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = asyncio.Queue[bytes | Exception | None]()
        self.ended = asyncio.Event()
        self.num_sent = 0

    async def List(self, request: Any, context: Any) -> AsyncGenerator[kvstore_pb2.StoreListReply, None]:
        if hasattr(context, "invocation_metadata"):
            yield listed(b"grpc")
            return
        try:
            while (scripted := await self.scripted.get()) is not None:
                if isinstance(scripted, Exception):
                    raise scripted
                yield listed(scripted)
                self.num_sent += 1
        finally:
            self.ended.set()


def listed(key: bytes) -> kvstore_pb2.StoreListReply:
    return kvstore_pb2.StoreListReply(objects=[kvstore_pb2.StoreListReply.Object(key=key)])


@pytest.fixture
async def store() -> Lister:
    return Lister()


@pytest.fixture
async def server(store: Lister) -> AsyncIterator[RpcServer]:
    server = RpcServer(TOKEN)
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(store, server.grpc)
    server.add_socket_service("KvStore", store)
    yield server
    await server.stop(0)


@pytest.fixture
async def stub(server: RpcServer, channels: Channels) -> Any:
    return kvstore_pb2_grpc.KvStoreStub(channels.to(await server.start("127.0.0.1", 0)))


@pytest.fixture
async def stream(stub: Any, channels: Channels) -> AsyncIterator[AsyncIterator[Any]]:
    """A stream that begins after a call whose reply named the socket address."""
    await channels.call(stub.Exists, EXISTS, timeout_s=PATIENCE_S)
    async with aclosing(channels.stream(stub.List, kvstore_pb2.StoreListRequest())) as messages:  # type: ignore[type-var]
        yield messages


async def key_of(stream: AsyncIterator[Any]) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        key: bytes = (await anext(stream)).objects[0].key
    return key


async def test_stream_uses_grpc_until_the_address_is_known(stub: Any, channels: Channels) -> None:
    assert [await key_of(channels.stream(stub.List, kvstore_pb2.StoreListRequest()))] == [b"grpc"]


async def test_messages_arrive_in_order_until_the_server_ends(stream: AsyncIterator[Any], store: Lister) -> None:
    for scripted in (b"a", b"b", b"c", None):
        store.scripted.put_nowait(scripted)
    async with asyncio.timeout(PATIENCE_S):
        assert [message.objects[0].key async for message in stream] == [b"a", b"b", b"c"]


async def test_calls_are_answered_during_a_stream(
    stream: AsyncIterator[Any], store: Lister, stub: Any, channels: Channels
) -> None:
    store.scripted.put_nowait(b"a")
    assert await key_of(stream) == b"a"
    await channels.call(stub.Exists, EXISTS, timeout_s=PATIENCE_S)
    store.scripted.put_nowait(b"b")
    assert await key_of(stream) == b"b"


@pytest.mark.parametrize(
    ("raised", "arrives"), [(StaleLease("too late"), StaleLease), (RuntimeError("secret"), MoonserveError)]
)
async def test_error_of_server_ends_the_stream(
    stream: AsyncIterator[Any], store: Lister, raised: Exception, arrives: type[MoonserveError]
) -> None:
    store.scripted.put_nowait(b"a")
    store.scripted.put_nowait(raised)
    assert await key_of(stream) == b"a"
    with pytest.raises(arrives, match=r"too late|internal error"):
        await key_of(stream)


async def test_malformed_message_ends_the_stream(stream: AsyncIterator[Any], store: Lister, channels: Channels) -> None:
    store.scripted.put_nowait(b"a")
    await key_of(stream)
    (routed,) = channels._channels.values()
    ((_, arriving),) = routed._socket_channel.live()._streams.items()  # type: ignore[attr-defined]
    arriving.put_nowait(b"\xff")
    with pytest.raises(PeerLost, match="malformed"):
        await key_of(stream)


async def test_lost_connection_ends_the_stream(stream: AsyncIterator[Any], store: Lister, server: RpcServer) -> None:
    store.scripted.put_nowait(b"a")
    assert await key_of(stream) == b"a"
    await server.stop(0)
    with pytest.raises(PeerLost):
        await key_of(stream)
    assert store.ended.is_set()


async def test_closing_the_stream_ends_it_at_the_server(stream: AsyncGenerator[Any, None], store: Lister) -> None:
    store.scripted.put_nowait(b"a")
    await key_of(stream)
    await stream.aclose()
    await asyncio.wait_for(store.ended.wait(), PATIENCE_S)


async def test_stream_pauses_while_the_client_does_not_read(
    stream: AsyncIterator[Any], store: Lister, channels: Channels
) -> None:
    """The server stops sending if the client does not read. Buffers hold a few messages of 1 MiB only."""
    store.scripted.put_nowait(b"a")
    await key_of(stream)
    (routed,) = channels._channels.values()
    transport = routed._socket_channel.live()._transport  # type: ignore[attr-defined]
    transport.pause_reading()
    for scripted in [LARGE] * NUM_LARGE + [None]:
        store.scripted.put_nowait(scripted)
    async with asyncio.timeout(PATIENCE_S):
        while store.num_sent < 2:  # noqa: ASYNC110 - it has begun
            await asyncio.sleep(0)
    assert store.num_sent < NUM_LARGE / 2
    transport.resume_reading()
    async with asyncio.timeout(PATIENCE_S):
        assert len([message async for message in stream]) == NUM_LARGE
