"""Nothing is kept over thousands of peers that came, were used and ended, well or badly.

`MOONSERVE_LEAK_CYCLES` is how many; the 10,000 of a thorough run are what the engine promises.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest

from protocol.errors import InvalidRequest, PeerLost
from tests.patience import NEVER_S, PATIENCE_S
from tests.thoroughness import THOROUGH
from tests.transfer.conftest import TOKEN, PeerInProcess
from transfer import Batch, Op, RemoteSegment, Segment, Transfer, TransferEngine, TransferOptions
from transfer.stats import EngineUsage

NBYTES = 1 << 20
CYCLES = int(os.environ.get("MOONSERVE_LEAK_CYCLES", "0")) or (10_000 if THOROUGH else 400)


def census() -> tuple[int, int, int, int]:
    """Descriptors, threads, mappings, bytes in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    return len(os.listdir("/proc/self/fd")), threading.active_count(), mappings, pages * os.sysconf("SC_PAGE_SIZE")


class Cycles:
    """One engine that outlives all of its peers."""

    def __init__(self) -> None:
        self.rng = random.Random(11)
        self.near = engine_of("shm", "tcp")
        self.local = self.near.allocate(NBYTES)

    def one(self) -> None:
        ends = ["well"] * 5 + ["target closes", "initiator closes", "killed", "stopped"]
        end, transport = self.rng.choice(ends), self.rng.choice(("shm", "tcp"))
        if end in ("killed", "stopped"):
            self.process(PeerInProcess(transport), stops=end == "stopped")
        else:
            with closing(engine_of(transport)) as far:
                self.engine(far, end)

    def process(self, peer: PeerInProcess, *, stops: bool) -> None:
        """It is killed while batches are under way; or stopped before, and given up at the deadline or forgotten."""
        remote, window_id = peer.lend(NBYTES)
        if stops:
            peer.stop()
        else:
            self.near.run([read_of(self.local, remote, 4096)], deadline_s=NEVER_S)
        deadline_s = 0.02 if stops else NEVER_S
        batches = submit(self.near, self.local, remote, window_id, deadline_s)
        if not stops:
            peer.end()
        elif self.rng.random() < 0.5:
            self.near.forget(remote.address)
        self.end(batches)
        peer.end()
        self.leave(remote.address)

    def engine(self, far: TransferEngine, end: str) -> None:
        """Its batches end well, or one of both ends is closed while they are under way."""
        memory = far.allocate(NBYTES, readable=True)
        window_id = far.open_window(memory, [(0, NBYTES)])
        remote = RemoteSegment(far.address, memory.segment_id)
        if end == "well":
            brought = far.register(bytearray(4096), readable=True)
            for each in (remote, RemoteSegment(far.address, brought.segment_id)):
                self.near.run([read_of(self.local, each, 4096)], deadline_s=NEVER_S)
            for batch in submit(self.near, self.local, remote, window_id, NEVER_S):
                batch.wait(NEVER_S)
            far.close_window(window_id)
            far.deregister(brought)
        else:
            near = engine_of("shm", "tcp") if end == "initiator closes" else self.near
            local = self.local if near is self.near else near.allocate(NBYTES)
            batches = submit(near, local, remote, window_id, NEVER_S)
            (far if near is self.near else near).close()
            self.end(batches)
        self.leave(far.address)

    def end(self, batches: list[Batch]) -> None:
        for batch in batches:
            # InvalidRequest: a READ of mapped memory found that its owner had deregistered it.
            with suppress(PeerLost, InvalidRequest):
                batch.wait(PATIENCE_S)

    def leave(self, address: str) -> None:
        self.near.forget(address)
        for peer in list(self.near._peers.leaving):
            peer.join()


def engine_of(*transports: str) -> TransferEngine:
    engine = TransferEngine(cluster_token=TOKEN, options=TransferOptions(transports=transports))
    engine.start()
    return engine


def submit(
    engine: TransferEngine, local: Segment, remote: RemoteSegment, window_id: int, deadline_s: float
) -> list[Batch]:
    half = NBYTES // 2
    read = read_of(local, remote, half)
    write = Transfer(Op.WRITE, local, half, remote, half, half, window_id)
    return [engine.submit([each], deadline_s=deadline_s) for each in (read, write, read)]


def read_of(local: Segment, remote: RemoteSegment, nbytes: int) -> Transfer:
    return Transfer(Op.READ, local, 0, remote, 0, nbytes)


@pytest.mark.slow
@pytest.mark.timeout(600 + CYCLES)
def test_nothing_is_kept_of_peers_that_have_gone() -> None:
    cycles = Cycles()
    warm_up = min(CYCLES // 2, 6000)  # metrics name up to 4,096 peers, and remember them
    for _ in range(warm_up):
        cycles.one()
    before = census()
    for _ in range(CYCLES - warm_up):
        cycles.one()
    after = census()
    sys.stdout.write(f"{CYCLES} cycles: {before} after {warm_up}, {after} at the end\n")
    # The allocator's arenas come and go; what leaks once per cycle shows.
    for now, then, slack in zip(after, before, (0, 0, 30, 6 << 20), strict=True):
        assert now <= then + slack
    usage = cycles.near.usage()
    assert usage == EngineUsage(num_segments=1, segment_bytes=NBYTES, num_windows=0, num_served=0, num_endpoints=0)
    assert not cycles.near._peers.met
    assert not cycles.local.num_users
    cycles.near.close()
