"""Two engines, with processes, bad links and strangers beside them, closed afterwards; memory with guards."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType

import pytest
import xxhash

from protocol.errors import MoonserveError, PeerLost
from tests.patience import PATIENCE_S
from tests.transfer.conftest import TOKEN, PeerInProcess
from tests.transfer.proxy import Proxy
from transfer import Op, RemoteSegment, Transfer, TransferEngine, TransferOptions
from transfer.address import parse
from transfer.base import Credentials
from transfer.stats import Incident
from transfer.tcp import handshake
from transfer.tcp.connection import Connection
from transfer.tcp.frames import HEADER_BYTES, Code, Header, Kind, decode, encode

NBYTES = 4 << 20
GUARD = 4096
"""Bytes before and behind each segment that nobody may touch."""


class Guarded:
    """A registered region within memory whose edges must stay as they are."""

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


class Stage:
    """`near` initiates; `far` owns `memory`, readable, with one window over all of it."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self._closing = contextlib.ExitStack()
        self.rng = random.Random(7)

    def __enter__(self) -> Stage:
        self.near, self.far = self.engine(), self.engine()
        self.local = Guarded(self.near, NBYTES)
        self.memory = Guarded(self.far, NBYTES, readable=True)
        self.content = self.rng.randbytes(NBYTES)
        self.local.buffer[:] = self.memory.buffer[:] = self.content
        self.window_id = self.far.open_window(self.memory.segment, [(0, NBYTES)])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()
        if error is None:
            self.local.require_untouched()
            self.memory.require_untouched()

    def engine(self, token: str = TOKEN) -> TransferEngine:
        options = TransferOptions(transports=(self.transport,), slice_bytes=256 << 10)
        engine = TransferEngine(cluster_token=token, options=options)
        engine.start()
        self._closing.callback(engine.close)
        return engine

    def proxy(self) -> tuple[Proxy, str]:
        """A bad link to `far`, and the address by which it is taken."""
        address = parse(self.far.address)
        (rail,) = address.rails["tcp"]
        proxy = Proxy(rail.endpoint)
        self._closing.callback(proxy.close)
        rails = {"tcp": (replace(rail, endpoint=proxy.endpoint),)}
        return proxy, str(replace(address, rails=rails))

    def write_to_process(self) -> tuple[PeerInProcess, Transfer]:
        peer = PeerInProcess(self.transport)
        self._closing.callback(peer.end)
        remote, window_id = peer.lend(NBYTES)
        return peer, Transfer(Op.WRITE, self.local.segment, 0, remote, 0, NBYTES, window_id)

    def stranger(self) -> Connection:
        """An authenticated connection to `far` on which anything can be said."""
        connection = authenticated(self.far.address)
        self._closing.callback(connection.close)
        return connection

    def transfer(self, op: Op, address: str = "", length: int = NBYTES) -> Transfer:
        """A WRITE of fresh content, or a READ into memory of zeros."""
        if op is Op.WRITE:
            self.content = self.rng.randbytes(length) + self.content[length:]
        self.local.buffer[:length] = self.content[:length] if op is Op.WRITE else bytes(length)
        remote = RemoteSegment(address or self.far.address, self.memory.segment.segment_id)
        window_id = self.window_id if op is Op.WRITE else None
        return Transfer(op, self.local.segment, 0, remote, 0, length, window_id)

    def run(
        self, transfer: Transfer, *, error: type[MoonserveError] | None = None, deadline_s: float = PATIENCE_S
    ) -> None:
        """The batch ends as it should."""
        batch = self.near.submit([transfer], deadline_s=deadline_s)
        with pytest.raises(error) if error is not None else contextlib.nullcontext():
            batch.wait(deadline_s + PATIENCE_S)

    def run_until_the_deadline(self, transfer: Transfer) -> None:
        """Nothing but the deadline ends the batch: the peer is lost then, and not before."""
        begin = time.monotonic()
        self.run(transfer, error=PeerLost, deadline_s=1.0)
        assert time.monotonic() - begin >= 1.0

    def require_arrived(self) -> None:
        assert self.memory.buffer == self.content
        assert self.local.buffer == self.content

    def require_served(self) -> None:
        """An honest peer is served as before."""
        engine = self.engine()
        local = Guarded(engine, 4096)
        remote = RemoteSegment(self.far.address, self.memory.segment.segment_id)
        read = Transfer(Op.READ, local.segment, 0, remote, 0, 4096)
        engine.submit([read], deadline_s=PATIENCE_S).wait(PATIENCE_S)
        assert local.buffer == self.memory.buffer[:4096]

    def count(self, incident: Incident) -> int:
        return sum(stats.incidents[incident] for stats in self.near.stats)


def dial(address: str) -> Connection:
    ((name, (rail,)),) = parse(address).rails.items()
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
    handshake.initiate(connection, credentials, parse(address).instance, checksums=True)
    return connection


@contextlib.contextmanager
def while_running(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def request_of(kind: Kind, stage: Stage, *, rows: list[tuple[int, int, int]], nbytes: int = 0) -> bytes:
    """Sealed as it should be, whatever it says."""
    header = Header(
        kind=kind,
        entries=len(rows),
        segment_id=stage.memory.segment.segment_id,
        window_id=stage.window_id if kind is Kind.WRITE else 0,
        nbytes=nbytes,
        checksum=xxhash.xxh3_64_intdigest(b"x" * nbytes) if nbytes < NBYTES else 0,
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
