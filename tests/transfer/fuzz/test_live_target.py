"""Fuzzes a live engine with mutated sessions, and the parser with any bytes. The engine keeps serving and nothing
outside the granted memory changes or is disclosed; the parser returns a frame or reports a violation.

`MOONSERVE_FUZZ_S` is the total time of all sessions (default 10 s). `MOONSERVE_FUZZ_SEED` is the first seed. A failure
names the seed of the input that caused it.
"""

import array
import os
import random
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.protocol.errors import MoonserveError
from moonserve.transfer import Op, RemoteSegment, Transfer, TransferEngine, TransferOptions
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.data_plane import address_of
from moonserve.transfer.memory.memfd import OwnedMemory
from moonserve.transfer.memory.scatter import Rows
from moonserve.transfer.paths import peer_address
from moonserve.transfer.paths.peer_address import parse_address
from moonserve.transfer.tcp import frames, handshake
from moonserve.transfer.tcp.connection import Connection
from moonserve.transfer.transport_interface import Credentials
from tests.patience import PATIENCE_S, until
from tests.thoroughness import examples
from tests.transfer.conftest import TOKEN
from tests.transfer.fuzz.mutations import (
    HIDDEN_ID,
    NBYTES,
    SEGMENT_ID,
    WINDOW,
    WINDOW_ID,
    Passed,
    Said,
    mutated,
    session,
)
from tests.transfer.stage import GUARD, dial

TOTAL_S = float(os.environ.get("MOONSERVE_FUZZ_S", "10"))
FIRST_SEED = int(os.environ.get("MOONSERVE_FUZZ_SEED", "0"))
_QUIET_S = 0.01
SECRET = secrets.token_bytes(32)
"""Fills all memory that peers must not see. A reply that contains any of it is a finding."""


class Quarry:
    """Engine under attack: it has a readable segment, a hidden one and one window, with secrets all around them."""

    def __init__(self, transport: str) -> None:
        options = TransferOptions(transports=(transport,), checksums=False)
        self.engine = TransferEngine(cluster_token=TOKEN, options=options)
        self.engine.start()
        self._all = bytearray(SECRET * ((2 * NBYTES + 3 * GUARD) // len(SECRET)))
        view = memoryview(self._all)
        self.segment = self.engine.register(view[GUARD : GUARD + NBYTES], readable=True)
        self.segment.buffer[:] = bytes(NBYTES)
        self.hidden = self.engine.register(view[2 * GUARD + NBYTES : 2 * GUARD + 2 * NBYTES])
        self.lent = self.engine.allocate(NBYTES, readable=True)
        self.window_id = self.engine.open_window(self.segment, [WINDOW])
        self.before = bytes(self._all)
        self.own = OwnedMemory(NBYTES)
        self.own.view[:] = b"\1" * NBYTES  # also the value of a live marker
        self.unsealed = os.memfd_create("unsealed")
        os.ftruncate(self.unsealed, NBYTES)
        self.no_memory, self.other_end = os.pipe()
        self.descriptors = {
            Passed.MEMORY: self.own.fd,
            Passed.UNSEALED: self.unsealed,
            Passed.NO_MEMORY: self.no_memory,
        }
        self.buffer = bytearray(NBYTES)
        assert (self.segment.segment_id, self.hidden.segment_id, self.window_id) == (SEGMENT_ID, HIDDEN_ID, WINDOW_ID)
        self.near = transport == "shm"
        self.honest = TransferEngine(cluster_token=TOKEN, options=options)
        self.honest.start()
        self.local = self.honest.allocate(4096)

    def close(self) -> None:
        self.honest.close()
        self.engine.close()
        for descriptor in (self.unsealed, self.no_memory, self.other_end):
            os.close(descriptor)

    def require_untouched(self) -> None:
        start, end = GUARD + WINDOW[0], GUARD + sum(WINDOW)
        assert self._all[:start] == self.before[:start]
        assert self._all[end:] == self.before[end:]
        assert self.lent.buffer == bytes(NBYTES)

    def require_serving(self) -> None:
        remote = RemoteSegment(self.engine.address, self.segment.segment_id)
        self.local.buffer[:] = secrets.token_bytes(4096)
        write = Transfer(Op.WRITE, self.local, 0, remote, WINDOW[0], 4096, self.window_id)
        self.honest.submit([write], deadline_s=PATIENCE_S).wait(PATIENCE_S)
        assert self.segment.buffer[WINDOW[0] : WINDOW[0] + 4096] == self.local.buffer


@pytest.fixture(params=["tcp", "shm"])
def quarry(request: pytest.FixtureRequest) -> Iterator[Quarry]:
    made = Quarry(request.param)
    yield made
    made.close()


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Exceptions that escaped from any thread of the engine."""
    found: list[BaseException] = []

    def note(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            found.append(args.exc_value)

    monkeypatch.setattr(threading, "excepthook", note)
    return found


def attack(quarry: Quarry, seed: int) -> bytes:
    """Runs one session. Returns everything that the engine sent."""
    rng, instance = random.Random(seed), parse_address(quarry.engine.address).instance
    said = session(rng, address_of(quarry.buffer), near=quarry.near)
    with closing(dial(quarry.engine.address)) as connection:
        if rng.random() < 0.1:
            hello = handshake._HELLO.pack(b"MOONXFER", handshake.PROTOCOL_VERSION, 1, bytes(32))
            stray = mutated(rng, hello + handshake._PROOF.pack(bytes(32), instance))
            said.insert(0, (stray, Passed.NONE))
        else:
            credentials = Credentials(TOKEN.encode(), b"")
            handshake.initiate(connection, credentials, instance, checksums=False)
        return _exchange(connection._sock, quarry, said)


def _exchange(sock: socket.socket, quarry: Quarry, said: Said) -> bytes:
    sock.setblocking(True)
    thread = threading.Thread(target=_send_all, args=(sock, quarry, said))
    thread.start()
    answer = bytearray()
    with suppress(ConnectionError):
        while data := _received(sock, thread):
            answer += data
    thread.join()
    return bytes(answer)


def _received(sock: socket.socket, sender: threading.Thread) -> bytes:
    """Returns the next data. Once everything is sent and the engine is silent, stops sending and awaits its hang-up."""
    silences = 0
    while silences < 1000:
        readable, _, _ = select.select([sock], [], [], _QUIET_S)
        if readable:
            return sock.recv(1 << 16)
        if not sender.is_alive():
            silences += 1
            with suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
    raise AssertionError("the engine neither answers nor hangs up")


def _send_all(sock: socket.socket, quarry: Quarry, said: Said) -> None:
    with suppress(OSError):
        for data, passed in said:
            if passed and quarry.near and data:
                descriptors = array.array("i", [quarry.descriptors[passed]])
                passing = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
                data = data[sock.sendmsg([data], passing) :]
            sock.sendall(data)
        if not quarry.near:  # over shared memory, a request is not served after its sender has hung up
            sock.shutdown(socket.SHUT_WR)


@pytest.mark.timeout(TOTAL_S + 600)
def test_mutated_sessions_do_not_end_the_engine_or_reach_memory_outside(
    quarry: Quarry, failures: list[BaseException]
) -> None:
    ends_at = time.monotonic() + TOTAL_S * 0.4
    seed = FIRST_SEED
    while time.monotonic() < ends_at:
        answer = attack(quarry, seed)
        assert SECRET[:16] not in answer, f"seed {seed} was told a secret"
        if seed % 20 == 0:
            quarry.require_untouched()
            quarry.require_serving()
        assert not failures, f"seed {seed}: {failures[0]!r}"
        seed += 1
    quarry.require_untouched()
    quarry.require_serving()
    sys.stdout.write(f"{seed - FIRST_SEED} sessions\n")
    until(lambda: len(quarry.engine._state.served) <= 2)  # connections end asynchronously


often = settings(max_examples=examples(150), deadline=None)
u64 = st.integers(0, 2**64 - 1)
T = TypeVar("T")
CREDENTIALS = Credentials(b"token", bytes(16))


def fed(data: bytes, work: Callable[[Connection], T]) -> T:
    """Runs `work` on a connection whose peer sends `data` and hangs up."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with closing(Connection(ours)) as connection:
            return work(connection)


@often
@given(st.binary(min_size=frames.HEADER_BYTES, max_size=frames.HEADER_BYTES))
def test_any_bytes_decode_to_a_header_or_a_violation(data: bytes) -> None:
    with suppress(frames.ProtocolViolation):
        assert frames.encode(frames.decode(data)) == data


@often
@given(
    st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3), max_size=5), st.integers(0, 10_000), st.integers(0, 7)
)
def test_a_changed_sealed_request_is_rejected(rows: list[tuple[int, int, int]], place: int, bit: int) -> None:
    sent = scatter.rows(*rows)
    header = frames.Header(frames.Kind.READ, entries=len(sent), segment_id=3)
    frame = bytearray(frames.request(header, sent, sealed=True))

    def read(connection: Connection) -> tuple[frames.Header, Rows]:
        arrived = frames.decode(connection.receive_bytes(frames.HEADER_BYTES))
        return arrived, frames.receive_rows(connection, arrived, sealed=True)

    arrived, found = fed(bytes(frame), read)
    assert arrived == header
    assert np.array_equal(found, sent)
    frame[place % len(frame)] ^= 1 << bit

    with pytest.raises(MoonserveError):
        fed(bytes(frame), read)


@often
@given(st.binary(max_size=300))
def test_both_ends_survive_any_handshake_and_accept_none(data: bytes) -> None:
    def respond(connection: Connection) -> None:
        handshake.respond(connection, CREDENTIALS, 7, checksums=True)

    def initiate(connection: Connection) -> None:
        handshake.initiate(connection, CREDENTIALS, bytes(16), checksums=True)

    hello = handshake._HELLO.pack(b"MOONXFER", 2, 1, bytes(32))
    challenge = handshake._CHALLENGE.pack(b"MOONXFER", 0, 2, 1, bytes(32))
    for said, answer in ((data, respond), (hello + data, respond), (data, initiate), (challenge + data, initiate)):
        with pytest.raises(MoonserveError):
            fed(said, answer)


@often
@given(st.text(max_size=200))
def test_any_text_parses_to_an_address_or_an_error(text: str) -> None:
    for candidate in (text, f"ms2;{text}", f"ms2;id=00;host=h;tcp={text}"):
        with suppress(MoonserveError):
            peer_address.parse_address(str(peer_address.parse_address(candidate)))
