"""Fixtures of the transfer tests: pairs of engines over every transport, and engines in other processes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest

from moonserve.transfer import FaultPlan, Op, RemoteSegment, Segment, Transfer, TransferEngine, TransferOptions
from moonserve.transfer.engine import _TRANSPORTS
from moonserve.transfer.rdma.device import discover_ports
from moonserve.transfer.rdma.transport import RdmaTransport
from tests.authority import Authority, Files
from tests.patience import PATIENCE_S
from tests.transfer.fault_injection import FaultInjector
from tests.transfer.peer_process import TOKEN as TOKEN
from tests.transfer.peer_process import PeerInProcess as PeerInProcess
from tests.transfer.rdma.fake_fabric import Wire
from tests.transfer.stage import Stage

RAILS = ("127.0.0.1", "127.0.0.2")
ALL = ("shm", "tcp", "tls", "rdma")
"""tls is tcp inside TLS. rdma runs on in-memory fake devices if the machine has no usable port (the guest has one)."""
HAS_RDMA = find_spec("pyverbs") is not None and any(port.usable for port in discover_ports())
Make = Callable[..., TransferEngine]
MakePair = Callable[..., "Pair"]


@dataclass
class Pair:
    """Two engines: `near` initiates, `far` owns `memory`, which is readable and covered by one window."""

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
        run(self.near, *transfers, deadline_s=deadline_s)

    def run_inline(self, *transfers: Transfer) -> None:
        """Runs the transfers in the caller's thread if the transport can."""
        self.near.run(transfers, deadline_s=PATIENCE_S)


def run(engine: TransferEngine, *transfers: Any, deadline_s: float = PATIENCE_S) -> None:
    """Runs the transfers in an engine thread and waits for them."""
    engine.submit(transfers, deadline_s=deadline_s).wait(deadline_s + PATIENCE_S)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the handshake timeout: on a busy machine a peer may be slow."""
    monkeypatch.setattr("moonserve.transfer.tcp.target._HANDSHAKE_S", PATIENCE_S)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes `transport` with the module's TRANSPORTS (default: shm and tcp), unless the test does it itself."""
    is_told = any("transport" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "transport" in metafunc.fixturenames and not is_told:
        metafunc.parametrize("transport", getattr(metafunc.module, "TRANSPORTS", ["shm", "tcp"]))


@pytest.fixture(scope="session")
def files(authority: Authority) -> Files:
    return authority.sign("engine", names="IP:127.0.0.1,DNS:anything")


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """Runs every rdma engine of the test on in-memory devices. Fails if one of their resources is not closed."""
    wire = Wire()
    monkeypatch.setitem(_TRANSPORTS, "rdma", partial(RdmaTransport, lambda: wire))
    yield wire
    assert not wire.regions
    assert not wire.pairs
    assert all(device.is_closed for device in wire.devices)


@pytest.fixture
def make_engine(transport: str, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes started engines and closes them. `files=` sets other TLS files than the default; None means no TLS."""
    engines: list[TransferEngine] = []
    usual: Files | None = None
    if transport == "tls":
        usual = request.getfixturevalue("files")
    if transport == "rdma" and not HAS_RDMA:
        request.getfixturevalue("wire")

    def make(
        token: str = TOKEN, *, faults: FaultPlan | None = None, files: Files | None = usual, **options: Any
    ) -> TransferEngine:
        options = {"transports": ("tcp" if transport == "tls" else transport,), **options}
        chosen = TransferOptions(**options, tls=files and files.tls)
        engine = TransferEngine(cluster_token=token, faults=faults, options=chosen)
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def make_pair(make_engine: Make) -> MakePair:
    """Makes pairs of engines over memory that the engines allocate, or, if `registered`, that the test provides."""

    def make(nbytes: int = 1 << 20, *, registered: bool = False, **options: Any) -> Pair:
        near, far = make_engine(**options), make_engine(**options)

        def memory_of(engine: TransferEngine) -> Segment:
            if registered:
                return engine.register(bytearray(nbytes), readable=True)
            return engine.allocate(nbytes, readable=True)

        local, memory = memory_of(near), memory_of(far)
        memory.buffer[:] = (bytes(i * 7 % 256 for i in range(256)) * (nbytes // 256 + 1))[:nbytes]
        return Pair(near, far, local, memory, far.open_window(memory, [(0, nbytes)]))

    return make


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    return make_pair()


@pytest.fixture
def stage(make_engine: Make) -> Iterator[Stage]:
    with Stage(make_engine) as stage:
        yield stage


@pytest.fixture
def peer(transport: str, request: pytest.FixtureRequest) -> Iterator[PeerInProcess]:
    tls = request.getfixturevalue("files").tls if transport == "tls" else None
    process = PeerInProcess("tcp" if tls else transport, tls=tls)
    yield process
    process.end()


@pytest.fixture
def injector(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultInjector]:
    yield (injector := FaultInjector(monkeypatch))
    assert not injector.open_sessions
