"""Two engines with guarded memory, faulty links and raw connections to them; all are closed at the end."""

import contextlib
import random
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import xxhash

from moonserve.protocol.errors import MoonserveError, PeerLost
from moonserve.transfer import Op, RemoteSegment, Transfer, TransferEngine
from moonserve.transfer.paths.peer_address import parse_address
from moonserve.transfer.paths.traffic_stats import Incident
from moonserve.transfer.tcp import handshake
from moonserve.transfer.tcp.connection import Connection
from moonserve.transfer.tcp.frames import HEADER_BYTES, Code, Header, Kind, decode, encode
from moonserve.transfer.transport_interface import Credentials
from tests.patience import PATIENCE_S
from tests.transfer.peer_process import TOKEN, PeerInProcess
from tests.transfer.proxy import Proxy

NBYTES = 4 << 20
GUARD = 4096
"""Number of bytes before and after each segment that must not change."""


class Guarded:
    """Registered region inside larger memory whose edges must not change."""

    def __init__(self, engine: TransferEngine, nbytes: int, *, readable: bool = False) -> None:
        self._all = bytearray(nbytes + 2 * GUARD)
        self._edge = secrets.token_bytes(GUARD)
        self._all[:GUARD] = self._all[-GUARD:] = self._edge
        self.segment = engine.register(memoryview(self._all)[GUARD : GUARD + nbytes], readable=readable)

    @property
    def buffer(self) -> memoryview:
        return self.segment.buffer

    def require_untouched(self) -> None:
        assert self._all[:GUARD] == self._all[-GUARD:] == self._edge


class Stage(contextlib.ExitStack):
    """Two engines: `near` initiates, `far` owns `memory`, which is readable and covered by one window."""

    def __init__(self, make_engine: Callable[..., TransferEngine], nbytes: int = NBYTES, **options: Any) -> None:
        super().__init__()
        self.engine = partial(make_engine, slice_bytes=256 << 10, **options)
        self.near, self.far = self.engine(), self.engine()
        self.local, self.memory = Guarded(self.near, nbytes), Guarded(self.far, nbytes, readable=True)
        self.rng = random.Random(7)
        self.content = self.rng.randbytes(nbytes)
        self.local.buffer[:] = self.memory.buffer[:] = self.content
        self.window_id = self.far.open_window(self.memory.segment, [(0, nbytes)])
        for last in (self.memory.require_untouched, self.local.require_untouched, self.far.close, self.near.close):
            self.callback(last)

    def proxies(self) -> tuple[list[Proxy], str]:
        """Puts a proxy in front of each rail of `far`. Returns the proxies and the address that leads through them."""
        address = parse_address(self.far.address)
        rails = address.rails["tcp"]
        proxies = [Proxy(rail.endpoint, rail.endpoint.partition(":")[0]) for rail in rails]
        for proxy in proxies:
            self.callback(proxy.close)
        behind = tuple(replace(rail, endpoint=proxy.endpoint) for rail, proxy in zip(rails, proxies, strict=True))
        return proxies, str(replace(address, rails={"tcp": behind}))

    def proxy(self) -> tuple[Proxy, str]:
        (proxy,), address = self.proxies()
        return proxy, address

    def stranger(self) -> Connection:
        """Opens an authenticated raw connection to `far`, on which any bytes can be sent."""
        return self.enter_context(contextlib.closing(authenticated(self.far.address)))

    def transfer(self, op: Op, address: str = "", length: int = 0) -> Transfer:
        """Builds a WRITE of fresh content, or a READ into zeroed memory. `length`: 0 means all of it."""
        length = length or len(self.content)
        if op is Op.WRITE:
            self.content = self.rng.randbytes(length) + self.content[length:]
        self.local.buffer[:length] = self.content[:length] if op is Op.WRITE else bytes(length)
        remote = RemoteSegment(address or self.far.address, self.memory.segment.segment_id)
        window_id = self.window_id if op is Op.WRITE else None
        return Transfer(op, self.local.segment, 0, remote, 0, length, window_id)

    def run(
        self, transfer: Transfer, *, error: type[MoonserveError] | None = None, deadline_s: float = PATIENCE_S
    ) -> None:
        """Runs the batch and requires that it succeeds, or fails with `error` if given."""
        batch = self.near.submit([transfer], deadline_s=deadline_s)
        with pytest.raises(error) if error is not None else contextlib.nullcontext():
            batch.wait(deadline_s + PATIENCE_S)

    def run_until_the_deadline(self, transfer: Transfer) -> None:
        """Requires that the batch fails with PeerLost at its deadline, and not before."""
        begin = time.monotonic()
        self.run(transfer, error=PeerLost, deadline_s=1.0)
        assert time.monotonic() - begin >= 1.0

    def require_arrived(self) -> None:
        assert self.memory.buffer == self.content
        assert self.local.buffer == self.content

    def require_served(self) -> None:
        """Requires that a new, well-behaved peer is served."""
        engine = self.engine()
        local = engine.allocate(4096)
        remote = RemoteSegment(self.far.address, self.memory.segment.segment_id)
        engine.submit([Transfer(Op.READ, local, 0, remote, 0, 4096)], deadline_s=PATIENCE_S).wait(PATIENCE_S)
        assert local.buffer == self.memory.buffer[:4096]

    def count(self, incident: Incident) -> int:
        return sum(stats.incidents[incident] for stats in self.near.stats)


class WritesTo:
    """Window in another process, with transfers that write into it and read it."""

    def __init__(self, engine: TransferEngine, peer: PeerInProcess, nbytes: int = 4096) -> None:
        self.engine = engine
        self.remote, self.window_id = peer.lend(nbytes)
        self.local = engine.allocate(nbytes)
        self.local.buffer[:] = b"w" * nbytes
        self.transfer = Transfer(Op.WRITE, self.local, 0, self.remote, 0, nbytes, self.window_id)
        self.read = replace(self.transfer, op=Op.READ, window_id=None)


def dial(address: str) -> Connection:
    ((name, (rail,)),) = parse_address(address).rails.items()
    if name == "shm":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect("\0" + rail.endpoint)
    else:
        host, _, port = rail.endpoint.rpartition(":")
        sock = socket.create_connection((host, int(port)))
    connection = Connection(sock)
    connection.set_deadline(time.monotonic() + PATIENCE_S)
    return connection


def authenticated(address: str) -> Connection:
    connection = dial(address)
    credentials = Credentials(TOKEN.encode(), b"")
    handshake.initiate(connection, credentials, parse_address(address).instance, checksums=True)
    return connection


def request_of(kind: Kind, stage: Stage, *, rows: list[tuple[int, int, int]], nbytes: int = 0) -> bytes:
    """Encodes a request with a valid seal, whatever its content."""
    header = Header(
        kind=kind,
        entries=len(rows),
        segment_id=stage.memory.segment.segment_id,
        window_id=stage.window_id if kind is Kind.WRITE else 0,
        nbytes=nbytes,
    )
    packed = b"".join(value.to_bytes(8, "little", signed=True) for row in rows for value in row)
    frame = encode(header) + packed
    return frame + xxhash.xxh3_64_digest(frame)


def code_of_answer(connection: Connection) -> Code:
    return decode(connection.receive_bytes(HEADER_BYTES)).code


def until_closed(connection: Connection) -> None:
    try:
        connection.discard(1 << 30)
    except PeerLost:
        connection.close()
        return
    raise AssertionError("the connection was not ended")
