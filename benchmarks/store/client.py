"""What a store's client implements to be measured, and how its calls are timed.

Its rule: whatever a user would do once (connect, register memory, make addresses of offsets) is not timed, and neither
is removing what was put. Every call is timed by itself. Needs numpy only.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.store import workload
from benchmarks.store.workload import HALF_BYTES, POOL_BYTES, Batch, Load
from benchmarks.transfer.contestant import touched
from benchmarks.transfer.workload import Bytes

STOCK, FRESH = "stock", "fresh"
"""Values that stay, to be got; values that are put, removed and put again."""
MIN_CALLS = 4
REMOVED_AT_ONCE = 512


def private_pool() -> Bytes:
    """Anonymous memory with huge pages where the kernel has them: what suits most stores best."""
    memory = mmap.mmap(-1, POOL_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return touched(memory)


class Client:
    """`facts` is what the servers' start told: addresses. `pool` is the memory that values come from and go to."""

    pool: Bytes

    def __init__(self, facts: dict[str, Any], options: dict[str, Any]) -> None:
        self.facts, self.options = facts, options

    def modes(self, load: Load) -> Sequence[str]:
        """Ways to do the same; the best one is shown."""
        return ("",)

    def prepared(self, batch: Batch, load: Load, mode: str) -> Any:
        """The call's arguments as the store wants them."""
        return batch

    def put(self, call: Any) -> None:
        raise NotImplementedError

    def get(self, call: Any) -> Sequence[Any] | None:
        """None when the bytes are in the pool now, else something with each value's bytes."""
        raise NotImplementedError

    def exists(self, call: Any) -> bool:
        raise NotImplementedError

    def remove(self, keys: Sequence[str]) -> None:
        raise NotImplementedError

    def got(self, call: Any, batch: Batch) -> None:
        """Untimed: gets, and sees to it that the bytes are in the pool."""
        values = self.get(call)
        for value, offset in zip(values or (), batch.offsets, strict=values is not None):
            self.pool[offset : offset + batch.length] = np.frombuffer(value, np.uint8)

    def close(self) -> None:
        pass


class Work:
    """One load in one mode, ready to run for a while, again and again; goes on where it stopped."""

    def __init__(self, client: Client, load: Load, mode: str) -> None:
        self._client, self._load = client, load
        if load.op == "put":
            self._batches = workload.source_batches(load, FRESH)
        else:
            self._batches = workload.landing_batches(load, STOCK)
        self._calls = [client.prepared(batch, load, mode) for batch in self._batches]
        self._next = 0

    def run(self, min_s: float) -> dict[str, Any]:
        """Calls that take at least that long together; their bytes, seconds and percentiles."""
        step: Callable[[Any], Any] = getattr(self._client, self._load.op)
        took: list[float] = []
        spent = 0.0
        while spent < min_s or len(took) < MIN_CALLS:
            call = self._calls[self._next]
            begin = time.perf_counter()
            answer = step(call)
            took.append(time.perf_counter() - begin)
            spent += took[-1]
            self._after(answer)
        self._clean()
        return {
            "calls": len(took),
            "seconds": spent,
            "p50_us": float(np.percentile(took, 50)) * 1e6,
            "p99_us": float(np.percentile(took, 99)) * 1e6,
        }

    def verify(self) -> int:
        """One sweep; how many values differ from what was put."""
        if self._load.op == "exists":
            return sum(not self._client.exists(call) for call in self._calls)
        if self._load.op == "put":
            return self._verify_put()
        self._client.pool[HALF_BYTES:] = 0
        for call, batch in zip(self._calls, self._batches, strict=True):
            self._client.got(call, batch)
        return workload.num_differing(self._client.pool, self._batches)

    def _verify_put(self) -> int:
        for call in self._calls:
            self._client.put(call)
        load = Load("get", self._load.value_bytes, self._load.batch)
        mode = self._client.modes(load)[0]
        landing = workload.landing_batches(load, FRESH)
        self._client.pool[HALF_BYTES:] = 0
        for batch in landing:
            self._client.got(self._client.prepared(batch, load, mode), batch)
        self._remove(self._batches)
        return workload.num_differing(self._client.pool, landing)

    def _after(self, answer: Any) -> None:
        if self._load.op == "exists" and not answer:
            raise ValueError("a value that was put does not exist")
        self._next += 1
        if self._next == len(self._calls):
            self._clean()

    def _clean(self) -> None:
        """A put ends with the store as it was; the other calls go round."""
        if self._load.op == "put":
            self._remove(self._batches[: self._next])
        if self._load.op == "put" or self._next == len(self._calls):
            self._next = 0

    def _remove(self, batches: Sequence[Batch]) -> None:
        keys = [key for batch in batches for key in batch.keys]
        for at in range(0, len(keys), REMOVED_AT_ONCE):
            self._client.remove(keys[at : at + REMOVED_AT_ONCE])


def stock(client: Client, load: Load) -> None:
    """Puts what gets of this size will ask for."""
    one_by_one = Load("put", load.value_bytes)
    mode = client.modes(one_by_one)[0]
    for batch in workload.source_batches(one_by_one, STOCK):
        client.put(client.prepared(batch, one_by_one, mode))
