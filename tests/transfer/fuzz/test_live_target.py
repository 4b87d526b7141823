"""A live engine fed with mutated sessions: it goes on serving, and nothing outside what it grants moves.

`MOONSERVE_FUZZ_S` is the time for all of it together, 10 s unless told. `MOONSERVE_FUZZ_SEED` begins elsewhere; a
failure names the seed of the one input that caused it.
"""

from __future__ import annotations

import array
import os
import random
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from tests.patience import PATIENCE_S, until
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
from transfer import Op, RemoteSegment, Transfer, TransferEngine, TransferOptions
from transfer.address import parse
from transfer.base import Credentials
from transfer.native import address_of
from transfer.shm.memfd import OwnedMemory
from transfer.tcp import handshake

TOTAL_S = float(os.environ.get("MOONSERVE_FUZZ_S", "10"))
FIRST_SEED = int(os.environ.get("MOONSERVE_FUZZ_SEED", "0"))
_QUIET_S = 0.01
SECRET = secrets.token_bytes(32)
"""Fills all memory that peers must not see: a reply that holds any of it is a finding."""


class Quarry:
    """An engine with a readable segment, a hidden one, one window, and secrets all around them."""

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
        self.own.view[:] = b"\1" * NBYTES  # which is also how a live marker looks
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
    """What escaped from any thread of the engine."""
    found: list[BaseException] = []

    def note(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            found.append(args.exc_value)

    monkeypatch.setattr(threading, "excepthook", note)
    return found


def attack(quarry: Quarry, seed: int) -> bytes:
    """One session; everything that came back."""
    rng, instance = random.Random(seed), parse(quarry.engine.address).instance
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
    """Nothing more is sent once all has been said and the engine falls silent; then it hangs up."""
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
        if not quarry.near:  # over shared memory a request whose sender has hung up is not served
            sock.shutdown(socket.SHUT_WR)


@pytest.mark.timeout(TOTAL_S + 600)
def test_mutated_sessions_neither_end_the_engine_nor_get_outside(quarry: Quarry, failures: list[BaseException]) -> None:
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
    until(lambda: len(quarry.engine._hosted.served) <= 2)  # they end in their own time
