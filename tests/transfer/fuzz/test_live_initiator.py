"""A live engine whose target lies: its batches end in time, right or as failures, and its memory stays its own."""

from __future__ import annotations

import array
import contextlib
import os
import random
import secrets
import socket
import sys
import time
from contextlib import closing, suppress

import pytest
import xxhash

from protocol.errors import MoonserveError
from tests.patience import PATIENCE_S
from tests.transfer.conftest import TOKEN
from tests.transfer.fuzz import FIRST_SEED, TOTAL_S
from tests.transfer.fuzz.mutations import INTERESTING, mutated
from tests.transfer.impostor import Impostor
from transfer import Op, RemoteSegment, Segment, Transfer, TransferEngine, TransferOptions
from transfer.base import Credentials
from transfer.shm.memfd import OwnedMemory
from transfer.tcp import handshake
from transfer.tcp.connection import Connection
from transfer.tcp.frames import HEADER_BYTES, Code, Header, Kind, decode, encode

NBYTES = 64 << 10
CONTENT = secrets.token_bytes(NBYTES)
DEADLINE_S = 0.1


class Liar:
    """What a target says as a seed tells."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self._own = OwnedMemory(NBYTES)
        self._own.view[:] = CONTENT
        self._unsealed = os.memfd_create("unsealed")
        os.ftruncate(self._unsealed, NBYTES)
        self._pipe = os.pipe()

    def close(self) -> None:
        for descriptor in (self._unsealed, *self._pipe):
            os.close(descriptor)

    def lie_to(self, connection: Connection, credentials: Credentials) -> None:
        if self.rng.random() < 0.05:
            connection.send(self.rng.randbytes(200))
            return
        handshake.respond(connection, credentials, 7, checksums=True)
        while True:
            header = decode(connection.receive_bytes(HEADER_BYTES))
            fd = connection.take_descriptor()
            if fd is not None:
                os.close(fd)
            sealed = header.kind in (Kind.READ, Kind.WRITE)
            rows = connection.receive_bytes(header.entries * 24 + (8 if sealed else 0))
            if header.kind is Kind.WRITE:
                connection.discard(header.nbytes)
            self._answer(connection, header, bytes(rows))

    def _answer(self, connection: Connection, header: Header, rows: bytes) -> None:
        match header.kind:
            case Kind.READ:
                start = int.from_bytes(rows[:8], "little")
                length = int.from_bytes(rows[16:24], "little")
                data = CONTENT[start : start + length]
                reply = Header(
                    kind=Kind.REPLY, nbytes=length, checksum=xxhash.xxh3_64_intdigest(data)
                )
                self._say(connection, encode(self._bent(reply)) + data)
            case Kind.MAP:
                self._lend(connection)
            case Kind.LIST:
                text = b'[{"segment_id":1,"nbytes":65536,"readable":true,"name":""}]'
                frame = encode(self._bent(Header(kind=Kind.REPLY, entries=len(text)))) + text
                self._say(connection, frame)
            case Kind.OFFER if not header.window_id:
                pass
            case _:
                self._say(connection, encode(self._bent(Header(kind=Kind.REPLY))))

    def _lend(self, connection: Connection) -> None:
        reply = self._bent(Header(kind=Kind.REPLY, nbytes=NBYTES))
        fds = (self._own.fd, self._own.fd, self._own.fd, self._unsealed, self._pipe[0], None)
        data, fd = encode(reply), self.rng.choice(fds)
        if self.rng.random() < 0.1:
            data = mutated(self.rng, data) or b"x"
        connection.flush()
        passing = (
            [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        )
        with suppress(OSError):
            connection._sock.sendmsg([data], passing)

    def _bent(self, header: Header) -> Header:
        if self.rng.random() > 0.3:
            return header
        if self.rng.random() < 0.3:
            return header._replace(code=self.rng.choice(list(Code)), entries=self.rng.randrange(3))
        field = self.rng.choice(("entries", "nbytes", "checksum", "source_id", "kind"))
        if field == "kind":
            return header._replace(kind=self.rng.choice(list(Kind)))
        number = self.rng.choice(INTERESTING)
        return header._replace(**{field: number % (1 << 32 if field == "entries" else 1 << 64)})

    def _say(self, connection: Connection, data: bytes) -> None:
        if self.rng.random() < 0.4:
            data = mutated(self.rng, data)
        connection.send(data)


@pytest.mark.timeout(TOTAL_S + 600)
def test_a_lying_target_gets_nothing_but_failures(transport: str) -> None:
    options = TransferOptions(transports=(transport,))
    with (
        closing(Liar()) as liar,
        Impostor(liar.lie_to, transport) as impostor,
        TransferEngine(cluster_token=TOKEN, options=options) as engine,
    ):
        everything = bytearray(b"g" * 3 * NBYTES)
        local = engine.register(memoryview(everything)[NBYTES : 2 * NBYTES])
        ends_at = time.monotonic() + TOTAL_S * 0.1
        seed = FIRST_SEED
        while time.monotonic() < ends_at:
            liar.rng = random.Random(seed)
            play(engine, impostor.address, local, everything, random.Random(seed))
            seed += 1
        sys.stdout.write(f"{seed - FIRST_SEED} batches\n")


def play(
    engine: TransferEngine, address: str, local: Segment, everything: bytearray, rng: random.Random
) -> None:
    start, length = rng.randrange(NBYTES // 2), rng.randint(1, NBYTES // 2)
    to = rng.randrange(NBYTES - length)
    everything[:] = b"g" * len(everything)
    remote = RemoteSegment(address, rng.randint(1, 3))
    op = rng.choice((Op.READ, Op.READ, Op.WRITE))
    window_id = 5 if op is Op.WRITE else None
    if rng.random() < 0.1:
        with contextlib.suppress(MoonserveError):
            engine.open(address, deadline_s=DEADLINE_S)
    else:
        batch = engine.submit(
            [Transfer(op, local, to, remote, start, length, window_id)], deadline_s=DEADLINE_S
        )
        with contextlib.suppress(MoonserveError):
            batch.wait(PATIENCE_S)
        assert batch.done
        if op is Op.READ and batch.errors == (None,):
            assert everything[NBYTES + to : NBYTES + to + length] == CONTENT[start : start + length]
    assert everything[: NBYTES + to] == b"g" * (NBYTES + to)
    assert everything[NBYTES + to + length :] == b"g" * (2 * NBYTES - to - length)
    if rng.random() < 0.2:
        engine.forget(address)
