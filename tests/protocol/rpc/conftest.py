"""Fixtures: a socket server in this process, and one in another process under asyncio or uvloop."""

from collections.abc import AsyncIterator, Iterator

import pytest

from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.protocol.rpc.socket_server import SocketServer
from tests.protocol.rpc.scripted import TOKEN, ScriptedStore, ServerProcess, server_process


@pytest.fixture
async def store() -> ScriptedStore:
    """The service of the socket server."""
    return ScriptedStore()


@pytest.fixture
async def lean(store: ScriptedStore) -> AsyncIterator[SocketServer]:
    """A socket server that is not started yet."""
    server = SocketServer(TOKEN)
    server.add("KvStore", store)
    yield server
    await server.stop(0)


@pytest.fixture
async def address(lean: SocketServer) -> str:
    """Starts the socket server and gives its TCP address."""
    tcp, _ = await lean.start("127.0.0.1")
    return tcp


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    async with Channels(TOKEN) as channels:
        yield channels


@pytest.fixture(params=["asyncio", "uvloop"])
def peer(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with server_process(request.param) as peer:
        yield peer
