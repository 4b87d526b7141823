"""Tests of the guarantees to callers of socket RPC, over TCP, Unix sockets and TLS, from asyncio and from threads."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from moonserve.protocol import errors
from moonserve.protocol.pb import kvstore_pb2
from moonserve.protocol.process.tls import Certificates
from moonserve.protocol.rpc.frames import MAX_MESSAGE_BYTES
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from moonserve.protocol.rpc.socket_client_sync import SyncChannel
from tests.patience import PATIENCE_S, answered
from tests.protocol.rpc.scripted import EXISTS_PATH, HERE, TOKEN, ScriptedStore, stub_of

ASKED = kvstore_pb2.StoreExistsRequest(keys=[HERE, b"gone"])
Call = Callable[..., Awaitable[Any]]


@pytest.fixture
async def server(store: ScriptedStore, certificates: Certificates | None) -> AsyncIterator[RpcServer]:
    server = RpcServer(TOKEN, certificates)
    server.add_socket_service("KvStore", store)
    async with server.serving("127.0.0.1", 0, 0):
        yield server


@pytest.fixture(params=["tcp", "unix", "tls"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def certificates(kind: str, request: pytest.FixtureRequest) -> Certificates | None:
    return request.getfixturevalue("tls") if kind == "tls" else None


@pytest.fixture
def address(server: RpcServer, kind: str) -> str:
    return server.lean_unix_address if kind == "unix" else server.lean_address


@pytest.fixture(params=["asyncio", "threads"])
async def call(address: str, certificates: Certificates | None, request: pytest.FixtureRequest) -> AsyncIterator[Call]:
    """Calls a method by name with a request and a time limit."""
    if request.param == "threads":
        channel = SyncChannel(address, TOKEN, certificates)
        loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(16)
        yield lambda name, message, timeout_s=PATIENCE_S: loop.run_in_executor(
            threads, partial(getattr(stub_of(channel), name), message, timeout=timeout_s)
        )
        threads.shutdown()
        channel.close()
    else:
        async with Channels(TOKEN, certificates) as channels:
            stub = stub_of(channels.to(address))
            yield lambda name, message, timeout_s=PATIENCE_S: channels.call(
                getattr(stub, name), message, timeout_s=timeout_s
            )


def lease(name: str = "l", num_keys: int = 0) -> kvstore_pb2.StoreLeaseRequest:
    return kvstore_pb2.StoreLeaseRequest(lease_id=name, keys=[b"k"] * num_keys)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
async def test_call_without_time_left_raises_deadline_exceeded(call: Call, timeout_s: float) -> None:
    await call("Exists", ASKED)  # opens the connection
    with pytest.raises(errors.DeadlineExceeded):
        await call("Lease", lease(), timeout_s=timeout_s)


@pytest.mark.parametrize("waits", [False, True])
async def test_error_arrives_as_the_raised_class(call: Call, store: ScriptedStore, waits: bool) -> None:
    store.error = errors.StaleLease("too late", lease_id="l-1")
    with pytest.raises(errors.StaleLease, match="too late") as caught:
        await call("Remove", kvstore_pb2.StoreRemoveRequest(corrupt=waits))
    assert caught.value.ids == {"lease_id": "l-1"}


@pytest.mark.parametrize("waits", [False, True])
async def test_unexpected_error_hides_details_and_is_logged(
    call: Call, store: ScriptedStore, waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store.error = RuntimeError("secret path")
    with pytest.raises(errors.MoonserveError, match="internal error"):
        await call("Remove", kvstore_pb2.StoreRemoveRequest(corrupt=waits))
    assert "secret path" in caplog.text
    assert list((await call("Exists", ASKED)).present) == [True, False]


async def test_handler_without_reply_message_is_an_internal_error(call: Call, store: ScriptedStore) -> None:
    store.commit_reply = None
    with pytest.raises(errors.MoonserveError, match="internal error"):
        await call("Commit", kvstore_pb2.StoreCommitRequest())


async def test_late_handler_is_cancelled_and_caller_gets_deadline_exceeded(call: Call, store: ScriptedStore) -> None:
    async def late() -> bool:
        await call("Exists", ASKED)  # opens the connection
        with pytest.raises(errors.DeadlineExceeded):
            await call("Lease", lease(), 0.05)
        return not store.begun.empty()  # the deadline may pass before the server reads the request

    await answered(late)
    assert await store.cancelled.get() == "l"
    assert list((await call("Exists", ASKED)).present) == [True, False]


async def test_large_messages_pass_in_both_directions(call: Call, store: ScriptedStore) -> None:
    keys = [bytes(100_000) for _ in range(50)]
    store.commit_reply = kvstore_pb2.StoreCommitReply(corrupt=keys)
    reply = await call("Commit", kvstore_pb2.StoreCommitRequest(keys=keys))
    assert list(reply.corrupt) == keys


async def test_messages_over_the_limit_are_refused_and_connection_stays(call: Call, store: ScriptedStore) -> None:
    too_large = [bytes(MAX_MESSAGE_BYTES)]
    with pytest.raises(errors.InvalidRequest, match="larger than the limit"):
        await call("Exists", kvstore_pb2.StoreExistsRequest(keys=too_large))
    store.commit_reply = kvstore_pb2.StoreCommitReply(corrupt=too_large)
    with pytest.raises(errors.InvalidRequest, match="larger than the limit"):
        await call("Commit", kvstore_pb2.StoreCommitRequest())
    assert list((await call("Exists", ASKED)).present) == [True, False]


async def test_method_that_is_not_implemented_is_incompatible(call: Call) -> None:
    with pytest.raises(errors.Incompatible, match="no method /moonserve"):
        await call("Stats", kvstore_pb2.StoreStatsRequest())


async def test_concurrent_calls_get_their_own_replies_in_any_order(call: Call, store: ScriptedStore) -> None:
    sizes = list(range(100))
    random.Random(0).shuffle(sizes)
    waiting = [asyncio.ensure_future(call("Lease", lease(str(n), n))) for n in sizes[:8]]
    for _ in waiting:
        await store.begun.get()
    quick = await asyncio.gather(*(call("Exists", ASKED) for _ in range(100)))
    assert all(list(reply.present) == [True, False] for reply in quick)
    store.go.set()
    assert [reply.segment_id for reply in await asyncio.gather(*waiting)] == sizes[:8]


async def test_stop_of_server_ends_its_calls(call: Call, store: ScriptedStore, server: RpcServer) -> None:
    await call("Exists", ASKED)
    pending = asyncio.ensure_future(call("Lease", lease()))
    await store.begun.get()
    await server.stop(0)
    with pytest.raises(errors.PeerLost):
        await pending
    assert store.cancelled.get_nowait() == "l"
    with pytest.raises(errors.PeerLost):
        await call("Exists", ASKED)


async def test_stopping_server_answers_within_grace_and_refuses_new_calls(
    call: Call, store: ScriptedStore, server: RpcServer
) -> None:
    pending = asyncio.ensure_future(call("Lease", lease(num_keys=2)))
    await store.begun.get()
    stopping = asyncio.create_task(server.stop(30))
    await asyncio.sleep(0)
    with pytest.raises(errors.PeerLost):
        await call("Exists", ASKED)
    store.go.set()
    assert (await pending).segment_id == 2
    await stopping


async def test_wrong_token_is_refused(address: str, certificates: Certificates | None) -> None:
    async with Channels("guess", certificates) as channels:
        with pytest.raises(errors.Unauthenticated):
            await channels.call(stub_of(channels.to(address)).Exists, ASKED, timeout_s=PATIENCE_S)
    with SyncChannel(address, "guess", certificates) as threads, pytest.raises(errors.Unauthenticated):
        await asyncio.to_thread(threads.call, EXISTS_PATH, b"", timeout_s=PATIENCE_S)


async def test_address_without_server_raises_peer_lost(channels: Channels) -> None:
    for address in ("lean://127.0.0.1:1", "lean+unix://nobody"):
        with pytest.raises(errors.PeerLost):
            await channels.call(stub_of(channels.to(address)).Exists, ASKED, timeout_s=PATIENCE_S)
        with pytest.raises(errors.PeerLost):
            SyncChannel(address, TOKEN).call(EXISTS_PATH, b"", timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    "address",
    ["lean://", "lean://host", "lean://:1", "lean+unix://", "h:1", "lean://h:65536", f"lean://h:{'1' * 5000}"],
)
def test_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="is not a lean address; write lean://host:port"):
        SyncChannel(address, TOKEN)
