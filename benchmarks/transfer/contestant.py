"""What a contestant implements.

A contestant is a module with two classes, `Target` and `Initiator`, each the inside of one process.
Its rule: whatever a user would do once (connect, register, prepare descriptors) is not timed.
"""

from __future__ import annotations

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
"""The mode in which batches come one after the other, each a blocking call."""
ASYNC_OR_SYNC = ("async", SYNC)


def private_pool() -> Bytes:
    """Anonymous memory with huge pages where the kernel has them: what suits most contestants best."""
    memory = mmap.mmap(-1, POOL_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return touched(memory)


def touched(memory: mmap.mmap) -> Bytes:
    pool: Bytes = np.frombuffer(memory, np.uint8)
    pool[:] = 0
    return pool


class Side:
    """One of the two processes. `pool` is its registered memory."""

    pool: Bytes

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def hello(self) -> dict[str, Any]:
        """What the other side needs to know; JSON."""
        return {}

    def fill(self, source: Bytes) -> None:
        """The pool's content from now on."""
        self.pool[:] = source

    def landed(self) -> Bytes:
        """The pool's content now."""
        return self.pool

    def connect(self, other: dict[str, Any]) -> None:
        """Both sides are called at the same time, each with the other's hello."""

    def close(self) -> None:
        pass


class Target(Side):
    def serve(self, load: Load, mode: str, stopped: Callable[[], bool]) -> None:
        """While the initiator works; returns at once where the contestant's threads serve."""


class Initiator(Side):
    """A contestant with requests that are posted and waited for; others replace `sweep`."""

    def prepare(self, load: Load, mode: str) -> None:
        self.load, self.mode, self.outstanding = load, mode, load.outstanding
        self.batches = [self.prepared(batch) for batch in load.batches()]

    def prepared(self, batch: Offsets) -> Any:
        """The batch as the contestant's own objects."""
        return batch

    def post(self, batch: Any) -> Any:
        """Begins the batch; who has nothing to post has a `sweep` of its own."""
        raise TypeError(f"{type(self).__module__} neither posts nor sweeps")

    def wait(self, posted: Any) -> None:
        pass

    def once(self, batch: Any) -> None:
        """One batch and nothing else, as fast as the contestant's interface can."""
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
        """Whole sweeps for at least that long."""
        moved, elapsed = 0, 0.0
        begin = time.perf_counter()
        while elapsed < min_s:
            self.sweep()
            moved += len(self.batches) * self.load.batch_bytes
            elapsed = time.perf_counter() - begin
        return {"bytes": moved, "seconds": elapsed}

    def latencies(self) -> list[float]:
        """Seconds of each batch, one at a time."""
        took = []
        for batch in self.batches:
            begin = time.perf_counter()
            self.once(batch)
            took.append(time.perf_counter() - begin)
        return took

    def done(self) -> None:
        """Untimed, after each run."""
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
    """Ways to do the same; the best few by size compete in the rounds, the best one is shown."""
    largest_block: int = POOL_BYTES
    scatter: bool = True
    latency: bool = True
    verified: bool = True
    ops: tuple[str, ...] = ("read", "write")

    def process_environment(self) -> dict[str, str]:
        """One thread for numpy and torch: they only copy."""
        return {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}

    def can(self, load: Load) -> bool:
        fits = load.block_bytes <= self.largest_block and load.op in self.ops
        return fits and (self.scatter or load.blocks == 1)
