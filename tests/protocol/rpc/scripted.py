"""A scripted store servicer, a process that serves one, and a client that sends arbitrary bytes."""

import asyncio
import contextlib
import json
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvloop

from moonserve.protocol.errors import Overloaded
from moonserve.protocol.pb import kvstore_pb2, kvstore_pb2_grpc
from moonserve.protocol.rpc import socket_addresses, socket_server_connection
from moonserve.protocol.rpc.grpc_transport import RpcServer
from moonserve.protocol.rpc.handshake import NONCE_BYTES, Initiator
from moonserve.protocol.rpc.socket_server_connection import ConnectionTakeover
from tests.patience import PATIENCE_S

TOKEN = "secret"
HERE = b"here"
EXISTS = kvstore_pb2.StoreExistsRequest(keys=[HERE])
EXISTS_PATH, LEASE_PATH = "/moonserve.KvStore/Exists", "/moonserve.KvStore/Lease"
LEASE = kvstore_pb2.StoreLeaseRequest(lease_id="l")
ECHO, FULL = "/test!echo", "/test!full"
"""Names of the services to which connections can be transferred."""


def stub_of(channel: Any) -> Any:
    """Returns a `KvStore` stub over any kind of channel."""
    return kvstore_pb2_grpc.KvStoreStub(channel)


class ScriptedStore(kvstore_pb2_grpc.KvStoreServicer):
    """`Exists` answers at once, `Lease` waits for `go`, `Remove` raises `error`, `Commit` returns `commit_reply`."""

    def __init__(self) -> None:
        self.begun = asyncio.Queue[str]()
        self.cancelled = asyncio.Queue[str]()
        self.go = asyncio.Event()
        self.error: BaseException = RuntimeError("nothing to raise")
        self.commit_reply: Any = None
        self.num_commits = 0

    async def Exists(self, request: Any, context: Any) -> kvstore_pb2.StoreExistsReply:
        return kvstore_pb2.StoreExistsReply(present=[key == HERE for key in request.keys])

    async def Lease(self, request: Any, context: Any) -> kvstore_pb2.StoreLeaseReply:
        self.begun.put_nowait(request.lease_id)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.put_nowait(request.lease_id)
            raise
        return kvstore_pb2.StoreLeaseReply(segment_id=len(request.keys))

    async def Remove(self, request: Any, context: Any) -> kvstore_pb2.StoreRemoveReply:
        if request.corrupt:  # raises after a wait, not at once
            await asyncio.sleep(0)
        raise self.error

    async def Commit(self, request: Any, context: Any) -> Any:
        self.num_commits += 1
        return self.commit_reply


def _echo(sock: socket.socket) -> None:
    """Echoes received bytes in upper case, in its own thread, until the peer closes the connection."""

    def run() -> None:
        with sock:
            sock.setblocking(True)
            while data := sock.recv(4096):
                sock.sendall(data.upper())

    threading.Thread(target=run, daemon=True).start()


def _refuse() -> None:
    raise Overloaded("no place", retry_after_s=1.0)


async def serve() -> None:
    """Prints its addresses and serves until it is killed or its input ends."""
    server, store = RpcServer(TOKEN), ScriptedStore()
    server.add_socket_service("KvStore", store)
    server.add_takeover(ConnectionTakeover(ECHO, lambda: None, _echo))
    server.add_takeover(ConnectionTakeover(FULL, _refuse, _echo))
    await server.start("127.0.0.1", 0)
    addresses = {"tcp": server.lean_address, "unix": server.lean_unix_address}
    sys.stdout.write(json.dumps(addresses) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


@dataclass
class ServerProcess:
    process: subprocess.Popen[str]
    tcp: str
    unix: str


@contextlib.contextmanager
def server_process(loop: str = "asyncio") -> Iterator[ServerProcess]:
    """Runs `serve` in a process whose event loop is `loop` (asyncio or uvloop)."""
    command = [sys.executable, "-m", "tests.protocol.rpc.scripted", loop]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield ServerProcess(process, **json.loads(process.stdout.readline()))
        finally:
            process.kill()


class Raw:
    """A client that sends arbitrary bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def dial(cls, address: str) -> "Raw":
        family, target = socket_addresses.parse_address(address)
        sock = socket.socket(family)
        sock.connect(target)
        return cls(*await asyncio.open_connection(sock=sock))

    async def prove(self) -> tuple[str, ...]:
        """Completes the handshake and returns the method paths that the server offers."""
        initiator = Initiator(TOKEN, secrets.token_bytes(NONCE_BYTES))
        self.writer.write(initiator.hello)
        while initiator.needed:
            self.writer.write(initiator.receive(await self.reader.readexactly(initiator.needed)))
        return initiator.methods

    async def ended(self) -> bool:
        """Waits until the server has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass
        await self.close()
        return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


if __name__ == "__main__":
    socket_server_connection.HANDSHAKE_S = PATIENCE_S  # handshakes are slow on a busy machine
    loop_factory = uvloop.new_event_loop if sys.argv[1] == "uvloop" else None
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serve())
