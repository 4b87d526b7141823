"""The rdma transport between processes on real queue pairs: transfers are exact, and broken queue pairs are handled."""

import gc
import os
import re
import subprocess
import threading
from collections.abc import Iterator

import pytest

from moonserve.protocol.errors import PeerLost
from moonserve.transfer import Op, Transfer, TransferEngine, TransferOptions
from moonserve.transfer.rdma.queue_pairs import QueuePairSet
from moonserve.transfer.rdma.verbs import VerbsQueuePair
from tests.patience import PATIENCE_S, until
from tests.transfer.conftest import TOKEN, PeerInProcess

pytestmark = pytest.mark.timeout(600)
LARGE = 1 << 20


def engine_over_rdma() -> TransferEngine:
    return TransferEngine(cluster_token=TOKEN, options=TransferOptions(transports=("rdma",)))


@pytest.fixture(scope="module")
def engine() -> Iterator[TransferEngine]:
    with engine_over_rdma() as engine:
        yield engine


class Remote:
    """Peer process with one readable segment and a window for writing to it."""

    def __init__(self) -> None:
        self.process = PeerInProcess("rdma")
        self.segment, self.window_id = self.process.lend(8 * LARGE)


def remote() -> Iterator[Remote]:
    remote = Remote()
    yield remote
    remote.process.end()


shared = pytest.fixture(remote, scope="module", name="shared")
doomed = pytest.fixture(remote, name="doomed")


@pytest.fixture
def under_way(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Event that is set when three reads have been posted."""
    event, count = threading.Event(), [0]
    post = VerbsQueuePair.read

    def read(self: VerbsQueuePair, *arguments: object) -> None:
        post(self, *arguments)  # type: ignore[arg-type]
        count[0] += 1
        if count[0] == 3:
            event.set()

    monkeypatch.setattr(VerbsQueuePair, "read", read)
    return event


def there_and_back(engine: TransferEngine, remote: Remote, nbytes: int = LARGE) -> None:
    """Writes random bytes, reads them into other memory, and compares."""
    out, back = engine.allocate(nbytes), engine.allocate(nbytes)
    out.buffer[:] = os.urandom(nbytes)
    engine.submit([Transfer(Op.WRITE, out, 0, remote.segment, 0, nbytes, remote.window_id)], deadline_s=120).wait()
    engine.submit([Transfer(Op.READ, back, 0, remote.segment, 0, nbytes)], deadline_s=120).wait()
    assert back.buffer == out.buffer
    engine.deregister(out)
    engine.deregister(back)


def large_reads(engine: TransferEngine, remote: Remote) -> list[Transfer]:
    local = engine.allocate(8 * LARGE)
    return [Transfer(Op.READ, local, i * LARGE, remote.segment, i * LARGE, LARGE) for i in range(8)] * 8


def test_a_peer_killed_mid_batch_fails_it_and_its_successor_is_served(
    engine: TransferEngine, doomed: Remote, shared: Remote, under_way: threading.Event
) -> None:
    reads = large_reads(engine, doomed) * 16  # more than can end before the peer does
    batch = engine.submit(reads, deadline_s=2 * PATIENCE_S)
    assert under_way.wait(PATIENCE_S)
    doomed.process.end()
    with pytest.raises(PeerLost):
        batch.wait(3 * PATIENCE_S)
    there_and_back(engine, shared)


def test_queue_pairs_forced_to_fail_mid_batch_are_replaced(
    engine: TransferEngine, doomed: Remote, under_way: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[QueuePairSet] = []
    connect = QueuePairSet.connect

    def remember(self: QueuePairSet, peers: object) -> None:
        connect(self, peers)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(QueuePairSet, "connect", remember)
    batch = engine.submit(large_reads(engine, doomed), deadline_s=2 * PATIENCE_S)
    assert under_way.wait(PATIENCE_S)
    for pairs in tuple(made):
        pairs.fail()
    batch.wait(3 * PATIENCE_S)
    assert len(made) > 1


def resources() -> list[int]:
    """Returns the kernel's counts of resources of each device: queue pairs, completion queues, regions, contexts."""
    shown = subprocess.run(["rdma", "resource", "show"], capture_output=True, text=True, check=True)
    return list(map(int, re.findall(r"(?<= )\d+", shown.stdout)))


def test_connecting_and_closing_repeatedly_leaks_nothing(engine: TransferEngine, shared: Remote) -> None:
    there_and_back(engine, shared, 4096)  # what the peer keeps from its first connection on is no leak

    def cycle() -> None:
        with engine_over_rdma() as engine:
            there_and_back(engine, shared, 4096)

    def left() -> list[int]:
        gc.collect()  # garbage cycles of earlier tests, for example errors, would be freed at any time
        return [*resources(), len(os.listdir("/proc/self/fd")), threading.active_count()]

    def is_back(before: list[int], now: list[int]) -> bool:
        """True if nothing is more than before. Less may be: what earlier tests killed is freed at any time."""
        return all(each <= most for each, most in zip(now, before, strict=True))

    idle = resources()
    cycle()
    until(lambda: is_back(idle, resources()))  # the other process closes its end asynchronously
    before = left()
    for _ in range(2):
        cycle()
    until(lambda: is_back(before, left()))


def link(interface: str, state: str) -> None:
    subprocess.run(["ip", "link", "set", interface, state], check=True)


def test_batch_survives_rail_that_goes_down(engine: TransferEngine, doomed: Remote, under_way: threading.Event) -> None:
    batch = engine.submit(large_reads(engine, doomed), deadline_s=2 * PATIENCE_S)
    assert under_way.wait(PATIENCE_S)
    link("eth1", "down")
    try:
        batch.wait(3 * PATIENCE_S)
        there_and_back(engine, doomed)
    finally:
        link("eth1", "up")
    there_and_back(engine, doomed)
