"""Interface of a contestant.

A contestant is a module with two classes, `Target` and `Initiator`, each of which runs in its own process.
Its rule: one-time work of a user (connecting, registering, preparing descriptors) is not timed.
"""

import mmap
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.transfer.workload import POOL_BYTES, Bytes, Load, Offsets

SYNC = "sync"
"""Mode with one batch after the other, each as a blocking call."""
ASYNC_OR_SYNC = ("async", SYNC)


def private_pool(nbytes: int = POOL_BYTES) -> Bytes:
    """Allocates anonymous memory, with huge pages if the kernel has them, which suits most contestants best."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return touched(memory)


def touched(memory: mmap.mmap) -> Bytes:
    pool: Bytes = np.frombuffer(memory, np.uint8)
    pool[:] = 0
    return pool


class Endpoint:
    """Base class of both processes of a contestant. `pool`: its registered memory."""

    pool: Bytes

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def hello(self) -> dict[str, Any]:
        """Returns the facts that the other side needs, as JSON values."""
        return {}

    def fill(self, source: Bytes) -> None:
        """Sets the pool's content."""
        self.pool[:] = source

    def landed(self) -> Bytes:
        """Returns the pool's current content."""
        return self.pool

    def connect(self, other: dict[str, Any]) -> None:
        """Connects to the other side, given its hello. Called on both sides at the same time."""

    def close(self) -> None:
        pass


class Target(Endpoint):
    def serve(self, load: Load, mode: str, stopped: Callable[[], bool]) -> None:
        """Serves while the initiator works. Returns at once if the contestant's own threads serve."""


class Initiator(Endpoint):
    """Base class for contestants that post requests and wait for them; others override `sweep` or `run`."""

    def prepare(self, load: Load, mode: str) -> None:
        self.load, self.mode, self.outstanding = load, mode, load.outstanding
        self.batches = [self.prepared(batch) for batch in load.batches()]

    def prepared(self, batch: Offsets) -> Any:
        """Converts a batch to the contestant's own objects."""
        return batch

    def post(self, batch: Any) -> Any:
        """Starts a batch. Raises TypeError unless the contestant overrides it."""
        raise TypeError(f"{type(self).__module__} neither posts nor sweeps")

    def wait(self, posted: Any) -> None:
        pass

    def once(self, batch: Any) -> None:
        """Moves a single batch by the contestant's fastest call."""
        self.wait(self.post(batch))

    def sweep(self) -> None:
        if self.mode == SYNC:
            for batch in self.batches:
                self.once(batch)
            return
        pending: deque[Any] = deque()
        for batch in self.batches:
            if len(pending) == self.outstanding:
                self.wait(pending.popleft())
            pending.append(self.post(batch))
        for posted in pending:
            self.wait(posted)

    def run(self, min_s: float) -> dict[str, Any]:
        """Runs whole sweeps for at least `min_s`; returns the bytes moved and the seconds."""
        moved, elapsed = 0, 0.0
        begin = time.perf_counter()
        while elapsed < min_s:
            self.sweep()
            moved += len(self.batches) * self.load.batch_bytes
            elapsed = time.perf_counter() - begin
        return {"bytes": moved, "seconds": elapsed}

    def latencies(self) -> list[float]:
        """Moves the batches one at a time; returns the seconds of each."""
        took = []
        for batch in self.batches:
            begin = time.perf_counter()
            self.once(batch)
            took.append(time.perf_counter() - begin)
        return took

    def done(self) -> None:
        """Called after each measurement; not timed."""
        self.batches = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    name: str
    group: str
    """"moonserve", "limit" or "peer"."""
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    in_peers_environment: bool = False
    modes: tuple[str, ...] = ("",)
    """Alternative ways to run a load. The best few per load take part in the rounds; the best one is reported."""
    largest_block: int = POOL_BYTES
    scatter: bool = True
    latency: bool = True
    verified: bool = True
    ops: tuple[str, ...] = ("read", "write")

    def process_environment(self) -> dict[str, str]:
        """Returns the environment, with one thread for numpy and torch, which only copy."""
        return {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}

    def can(self, load: Load) -> bool:
        fits = load.block_bytes <= self.largest_block and load.op in self.ops
        return fits and (self.scatter or load.blocks == 1)
