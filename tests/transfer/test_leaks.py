"""Nothing is kept over thousands of peers that came, were used and ended, well or badly.

`MOONSERVE_LEAK_CYCLES` is how many; the 10,000 of a thorough run are what the engine promises.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import DeadlineExceeded, InvalidRequest, MoonserveError, PeerLost
from tests.patience import NEVER_S, PATIENCE_S
from tests.thoroughness import THOROUGH
from tests.transfer.conftest import TOKEN, PeerInProcess
from transfer import Op, RemoteSegment, Segment, Transfer, TransferEngine, TransferOptions

NBYTES = 1 << 20
CYCLES = int(os.environ.get("MOONSERVE_LEAK_CYCLES", "0")) or (10_000 if THOROUGH else 400)


@dataclass(frozen=True)
class Census:
    descriptors: int
    threads: int
    mappings: int
    resident_bytes: int

    @staticmethod
    def take() -> Census:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Census(
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            mappings=len(Path("/proc/self/maps").read_text().splitlines()),
            resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        )


class Cycles:
    """One engine that outlives all of its peers."""

    def __init__(self) -> None:
        self.rng = random.Random(11)
        self.near = engine_of("shm", "tcp")
        self.local = self.near.allocate(NBYTES)

    def one(self) -> None:
        kinds: list[Any] = [self.connect_and_close] * 5
        kinds += [self.end_in_the_middle, self.end_ourselves, self.kill, self.stay_silent]
        self.rng.choice(kinds)(self.rng.choice(("shm", "tcp")))

    def connect_and_close(self, transport: str) -> None:
        with closing(engine_of(transport)) as far:
            memory = far.allocate(4096, readable=True)
            brought = far.register(bytearray(4096), readable=True)
            window_id = far.open_window(memory, [(0, 4096)])
            for segment in (memory, brought):
                remote = RemoteSegment(far.address, segment.segment_id)
                self.near.run([read_of(self.local, remote, 4096)], deadline_s=NEVER_S)
            remote = RemoteSegment(far.address, memory.segment_id)
            write = Transfer(Op.WRITE, self.local, 0, remote, 0, 4096, window_id)
            self.near.submit([write], deadline_s=NEVER_S).wait(NEVER_S)
            far.close_window(window_id)
            far.deregister(brought)
        self.leave(far.address)

    def end_in_the_middle(self, transport: str) -> None:
        """The target is closed while batches are under way."""
        far = engine_of(transport)
        memory = far.allocate(NBYTES, readable=True)
        window_id = far.open_window(memory, [(0, NBYTES)])
        remote = RemoteSegment(far.address, memory.segment_id)
        batches = self.submit(self.near, self.local, remote, window_id)
        far.close()
        self.end(batches)
        self.leave(far.address)

    def end_ourselves(self, transport: str) -> None:
        """An initiator is closed while batches are under way."""
        with closing(engine_of(transport)) as far:
            memory = far.allocate(NBYTES, readable=True)
            window_id = far.open_window(memory, [(0, NBYTES)])
            near = engine_of("shm", "tcp")
            local = near.allocate(NBYTES)
            remote = RemoteSegment(far.address, memory.segment_id)
            batches = self.submit(near, local, remote, window_id)
            near.close()
            self.end(batches)

    def kill(self, transport: str) -> None:
        """A process is killed while batches are under way."""
        peer = PeerInProcess(transport)
        remote, window_id = peer.lend(NBYTES)
        self.near.run([read_of(self.local, remote, 4096)], deadline_s=NEVER_S)
        batches = self.submit(self.near, self.local, remote, window_id)
        peer.end()
        self.end(batches)
        self.leave(remote.address)

    def stay_silent(self, transport: str) -> None:
        """A stopped process: given up at the deadline, or forgotten before."""
        peer = PeerInProcess(transport)
        remote, window_id = peer.lend(NBYTES)
        peer.stop()
        batches = self.submit(self.near, self.local, remote, window_id, deadline_s=0.02)
        if self.rng.random() < 0.5:
            self.near.forget(remote.address)
        self.end(batches)
        peer.end()
        self.leave(remote.address)

    def submit(
        self,
        engine: TransferEngine,
        local: Segment,
        remote: RemoteSegment,
        window_id: int,
        deadline_s: float = NEVER_S,
    ) -> list[Any]:
        half = NBYTES // 2
        read = Transfer(Op.READ, local, 0, remote, 0, half)
        write = Transfer(Op.WRITE, local, half, remote, half, half, window_id)
        return [engine.submit([each], deadline_s=deadline_s) for each in (read, write, read)]

    def end(self, batches: list[Any]) -> None:
        for batch in batches:
            # InvalidRequest: a READ of mapped memory found that its owner had deregistered it.
            with suppress(PeerLost, InvalidRequest), told_if_it_hangs():
                batch.wait(PATIENCE_S)

    def leave(self, address: str) -> None:
        self.near.forget(address)
        for peer in list(self.near._peers.leaving):
            peer.join()


@contextmanager
def told_if_it_hangs() -> Iterator[None]:
    """Where every thread waits: among thousands of cycles it will not happen again when looked for."""
    try:
        yield
    except DeadlineExceeded:
        faulthandler.dump_traceback(all_threads=True)
        raise


def engine_of(*transports: str) -> TransferEngine:
    engine = TransferEngine(cluster_token=TOKEN, options=TransferOptions(transports=transports))
    engine.start()
    return engine


def read_of(local: Segment, remote: RemoteSegment, nbytes: int) -> Transfer:
    return Transfer(Op.READ, local, 0, remote, 0, nbytes)


@pytest.fixture
def cycles() -> Iterator[Cycles]:
    made = Cycles()
    yield made
    made.near.close()


@pytest.mark.slow
@pytest.mark.timeout(600 + CYCLES)
def test_nothing_is_kept_of_peers_that_have_gone(cycles: Cycles) -> None:
    warm_up = min(CYCLES // 2, 6000)  # metrics name up to 4,096 peers, and remember them
    for _ in range(warm_up):
        cycles.one()
    before = Census.take()
    for _ in range(CYCLES - warm_up):
        cycles.one()
    after = Census.take()
    sys.stdout.write(f"{CYCLES} cycles: {before} after {warm_up}, {after} at the end\n")
    assert after.descriptors <= before.descriptors
    assert after.threads <= before.threads
    # The allocator's arenas come and go; what leaks once per cycle shows.
    assert after.mappings <= before.mappings + 30
    assert after.resident_bytes <= before.resident_bytes + (6 << 20)
    near = cycles.near
    usage = near.usage()
    assert (usage.num_segments, usage.num_windows, usage.num_served, usage.num_endpoints) == (
        1,
        0,
        0,
        0,
    )
    assert not near._peers.met
    with suppress(MoonserveError):
        near.deregister(cycles.local)
    assert cycles.local.num_users == 0
