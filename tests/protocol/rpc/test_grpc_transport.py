"""Tests of RPC over real loopback sockets: tokens, error translation, lost peers, streams."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from moonserve.protocol import errors
from moonserve.protocol.pb import worker_pb2, worker_pb2_grpc
from moonserve.protocol.request import GatewayId, RequestId, Token
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from moonserve.protocol.rpc.transport_selection import RoutedChannel
from moonserve.protocol.rpc.wire import failure_from_wire, failure_to_wire
from moonserve.worker.token_streams import GatewayStreams
from tests.patience import NEVER_S, PATIENCE_S
from tests.protocol.rpc.scripted import TOKEN


class Worker(worker_pb2_grpc.WorkerServicer):
    """A worker whose `Cancel` hangs or raises `error`, and which streams through GatewayStreams."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.hangs = False
        self.called = asyncio.Event()
        self.remaining_s = 0.0
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.streams = GatewayStreams(self.lost.put_nowait, grace_s=NEVER_S)

    async def Cancel(self, request: Any, context: Any) -> worker_pb2.CancelReply:
        self.called.set()
        self.remaining_s = context.time_remaining()
        if self.hangs:
            await asyncio.Event().wait()
        if self.error:
            raise self.error
        return worker_pb2.CancelReply()

    async def Events(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.EventBatch]:
        async for batch in self.streams.events(GatewayId(request.gateway_id)):
            yield batch


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    yield worker
    worker.streams.close()


@pytest.fixture(params=["grpc", "lean"])
async def address(request: pytest.FixtureRequest, worker: Worker, channels: Channels) -> AsyncIterator[str]:
    """The worker's address as `host:port`. `channels` call it over gRPC or sockets."""
    server = RpcServer(TOKEN)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server.grpc)
    if request.param == "lean":
        server.add_socket_service("Worker", worker)
    async with server.serving("127.0.0.1", 0, 0) as address:
        if request.param == "lean":
            await until_lean(channels, address)
            worker.called.clear()
        yield address
        await channels.close()


async def until_lean(channels: Channels, address: str) -> None:
    """Repeats calls until calls to `address` go over sockets."""
    channel = cast(RoutedChannel, channels.to(address))
    async with asyncio.timeout(PATIENCE_S):
        while channel.connection_for("/moonserve.Worker/Cancel") is None:
            await cancel(channels, address)


async def cancel(channels: Channels, address: str) -> None:
    stub = worker_pb2_grpc.WorkerStub(channels.to(address))
    await channels.call(stub.Cancel, worker_pb2.CancelRequest(request_id="r"), timeout_s=PATIENCE_S)


async def test_error_arrives_as_raised_and_unexpected_error_hides_details(
    worker: Worker, channels: Channels, address: str
) -> None:
    worker.error = errors.StaleLease("too late", lease_id="l-1")
    with pytest.raises(errors.StaleLease, match="too late") as caught:
        await cancel(channels, address)
    assert caught.value.ids == {"lease_id": "l-1"}
    worker.error = RuntimeError("secret path")
    with pytest.raises(errors.MoonserveError, match="internal error"):
        await cancel(channels, address)


async def test_wrong_token_is_refused(address: str) -> None:
    async with Channels("guess") as foreign:
        with pytest.raises(errors.Unauthenticated):
            await cancel(foreign, address)


@pytest.mark.parametrize("forgets", [False, True])
async def test_call_ends_with_its_caller_or_when_peer_is_forgotten(
    worker: Worker, channels: Channels, address: str, forgets: bool
) -> None:
    """A call to a forgotten peer ends with PeerLost, not with a cancellation, because its caller was not cancelled."""
    worker.hangs = True
    calling = asyncio.create_task(cancel(channels, address))
    await worker.called.wait()
    if forgets:
        await channels.forget(address)
    else:
        calling.cancel()
    with pytest.raises(errors.PeerLost if forgets else asyncio.CancelledError):
        await calling


async def test_call_not_answered_in_time_raises_peer_lost(worker: Worker, channels: Channels, address: str) -> None:
    worker.hangs = True
    stub = worker_pb2_grpc.WorkerStub(channels.to(address))
    with pytest.raises(errors.PeerLost, match="deadline_exceeded"):
        await channels.call(stub.Cancel, worker_pb2.CancelRequest(), timeout_s=0.02)


async def test_handler_sees_the_remaining_time(worker: Worker, channels: Channels, address: str) -> None:
    await cancel(channels, address)
    assert 0 < worker.remaining_s <= PATIENCE_S + 0.1  # gRPC sends tenths of seconds, rounded up


async def test_calls_reach_restarted_server_over_socket_again(channels: Channels) -> None:
    """A restarted server has new socket addresses, which its first reply over gRPC names."""
    port = 0
    for _ in range(2):
        server, worker = RpcServer(TOKEN), Worker()
        worker_pb2_grpc.add_WorkerServicer_to_server(worker, server.grpc)
        server.add_socket_service("Worker", worker)
        async with server.serving("127.0.0.1", port, 0) as address:
            port = int(address.rpartition(":")[2])
            stub = worker_pb2_grpc.WorkerStub(channels.to(address))
            request = worker_pb2.CancelRequest()
            await channels.call(stub.Cancel, request, timeout_s=PATIENCE_S, wait_for_ready=True)
            await until_lean(channels, address)


async def test_error_of_taken_port_names_the_flag(address: str) -> None:
    with pytest.raises(errors.ConfigError, match=r"port in use.*another --port"):
        await RpcServer("t").start("127.0.0.1", int(address.rpartition(":")[2]))


def token(index: int) -> Token:
    return Token(request_id=RequestId("r"), index=index, token_id=7)


async def test_events_sent_before_the_stream_are_not_lost(worker: Worker, channels: Channels, address: str) -> None:
    worker.streams.send(GatewayId("g"), tokens=[token(0)])
    stub = worker_pb2_grpc.WorkerStub(channels.to(address))
    stream = channels.stream(stub.Events, worker_pb2.EventsRequest(gateway_id="g"))
    assert not (await anext(stream)).tokens
    assert [t.index for t in (await anext(stream)).tokens] == [0]
    worker.streams.send(GatewayId("g"), tokens=[token(1)])
    worker.streams.send(GatewayId("g"), tokens=[token(2)])
    assert [t.index for t in (await anext(stream)).tokens] == [1, 2]
    worker.streams._grace_s = 0.0  # for gateways that leave from now on
    await stream.aclose()  # type: ignore[attr-defined]
    assert await asyncio.wait_for(worker.lost.get(), PATIENCE_S) == "g"


@pytest.mark.parametrize("code", sorted(errors.error_classes()))
def test_every_error_class_crosses_the_wire(code: str) -> None:
    cls = errors.error_classes()[code]
    error = cls("m", request_id="r", **({"retry_after_s": 2.5} if cls is errors.Overloaded else {}))
    back = failure_from_wire(failure_to_wire(error))
    assert type(back) is cls
    assert (back.message, back.ids, back.retry_after_s) == ("m", error.ids, error.retry_after_s)
