"""Engines in pairs, and engines in processes that can be stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.transfer.bench import Bench, Orders
from tests.transfer.fake_transport import FakeNetwork
from transfer import Op, RemoteSegment, Segment, Transfer, TransferEngine, TransferOptions, registry
from transfer.rdma.device import discover

TOKEN = "token of the test cluster"
ROOT = Path(__file__).parents[2]


@dataclass
class Pair:
    """`near` initiates; `far` owns `memory`, readable, with one window over all of it."""

    near: TransferEngine
    far: TransferEngine
    local: Segment
    memory: Segment
    window_id: int

    @property
    def remote(self) -> RemoteSegment:
        return RemoteSegment(self.far.address, self.memory.segment_id)

    def read(self, to: int, start: int, length: int) -> Transfer:
        return Transfer(Op.READ, self.local, to, self.remote, start, length)

    def write(self, start: int, to: int, length: int, window_id: int | None = None) -> Transfer:
        window_id = window_id or self.window_id
        return Transfer(Op.WRITE, self.local, start, self.remote, to, length, window_id)

    def run(self, *transfers: Transfer, deadline_s: float = PATIENCE_S) -> None:
        self.near.submit(transfers, deadline_s=deadline_s).wait(deadline_s + PATIENCE_S)


class PeerInProcess:
    """Drives tests/transfer/peer_process.py."""

    def __init__(
        self, transports: str, *tls_files: str, within: Sequence[str] = (), rails: str = ""
    ) -> None:
        """`within` is a command that runs another, as in another network namespace."""
        peer = [sys.executable, "-m", "tests.transfer.peer_process", TOKEN, transports, rails]
        self.process = subprocess.Popen(
            [*within, *peer, *tls_files],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def tell(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, *command: Any) -> Any:
        self.tell(*command)
        return self.answer()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def _transports() -> list[str]:
    """What this machine has: rdma only where a device port is usable, as in the guest (tests/rdma)."""
    has_rdma = find_spec("pyverbs") is not None and any(port.usable for port in discover())
    return ["shm", "tcp", *(["rdma"] if has_rdma else [])]


LINKS = [name for name in _transports() if name != "shm"]
"""Those that carry bytes over a link, on which they can be damaged: over shm the target copies."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever shakes hands slowly is on a busy machine."""
    monkeypatch.setattr("transfer.wire.acceptor._HANDSHAKE_S", PATIENCE_S)


@pytest.fixture(params=_transports())
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_engine(transport: str) -> Iterator[Callable[..., TransferEngine]]:
    engines: list[TransferEngine] = []

    def make(token: str = TOKEN, **options: Any) -> TransferEngine:
        engine = TransferEngine(
            cluster_token=token,
            faults=options.pop("faults", None),
            options=TransferOptions(transports=(transport,), **options),
        )
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def pair(make_engine: Callable[..., TransferEngine]) -> Pair:
    near, far = make_engine(), make_engine()
    nbytes = 1 << 20
    memory = far.allocate(nbytes, readable=True)
    memory.buffer[:] = bytes(i * 7 % 256 for i in range(256)) * (nbytes // 256)
    return Pair(near, far, near.allocate(nbytes), memory, far.open_window(memory, [(0, nbytes)]))


@pytest.fixture
def peer(transport: str) -> Iterator[PeerInProcess]:
    process = PeerInProcess(transport)
    yield process
    process.end()


@pytest.fixture
def orders() -> Orders:
    return Orders()


@pytest.fixture
def make_bench(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(num_rails: int = 1, **options: int) -> Bench:
        network = FakeNetwork(orders)
        monkeypatch.setitem(
            registry._TRANSPORTS, "fake", lambda: network.transport(num_rails=num_rails)
        )
        made.append(Bench(network, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.close()
        assert not bench.network.open_sessions
