"""Interface of the store clients to be measured, and the timing of their calls.

Its rule: one-time work of a user (connecting, registering memory, computing addresses) and the removal of values are
not timed. Every call is timed separately. Needs numpy only.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.store.speed import workload
from benchmarks.store.speed.workload import HALF_BYTES, Batch, Load
from benchmarks.transfer.workload import Bytes

STOCK, FRESH = "stock", "fresh"
"""Kinds of values: permanent ones for gets; ones that are put, removed and put again."""
MIN_CALLS = 4
REMOVED_AT_ONCE = 512


class StoreClient:
    """Base class of clients. `facts`: addresses from the servers. `pool`: memory for the values of puts and gets."""

    pool: Bytes

    def __init__(self, facts: dict[str, Any], options: dict[str, Any]) -> None:
        self.facts, self.options = facts, options

    def modes(self, load: Load) -> Sequence[str]:
        """Returns alternative ways to run a load; the best one is reported."""
        return ("",)

    def prepared(self, batch: Batch, load: Load, mode: str) -> Any:
        """Converts a batch to the arguments of the store's call."""
        return batch

    def put(self, call: Any) -> None:
        raise NotImplementedError

    def get(self, call: Any) -> Sequence[Any] | None:
        """Reads a batch. Returns None if the bytes are in the pool, otherwise a buffer per value."""
        raise NotImplementedError

    def exists(self, call: Any) -> bool:
        raise NotImplementedError

    def remove(self, keys: Sequence[str]) -> None:
        raise NotImplementedError

    def got(self, call: Any, batch: Batch) -> None:
        """Reads a batch and ensures that its bytes are in the pool; not timed."""
        values = self.get(call)
        for value, offset in zip(values or (), batch.offsets, strict=values is not None):
            self.pool[offset : offset + batch.length] = np.frombuffer(value, np.uint8)

    def close(self) -> None:
        pass


class PreparedLoad:
    """One load in one mode, prepared for repeated runs. Runs of gets continue where the previous one ended."""

    def __init__(self, client: StoreClient, load: Load, mode: str) -> None:
        self._client, self._load = client, load
        if load.op == "put":
            self._batches = workload.source_batches(load, FRESH)
        else:
            self._batches = workload.landing_batches(load, STOCK)
        self._calls = [client.prepared(batch, load, mode) for batch in self._batches]
        self._next = 0

    def run(self, min_s: float) -> dict[str, Any]:
        """Makes calls for at least `min_s` in total; returns their number, seconds and percentiles."""
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
        """Runs one sweep; returns the number of wrong or missing values."""
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
        """Removes the values that were put; the other operations start over after the last call."""
        if self._load.op == "put":
            self._remove(self._batches[: self._next])
        if self._load.op == "put" or self._next == len(self._calls):
            self._next = 0

    def _remove(self, batches: Sequence[Batch]) -> None:
        keys = [key for batch in batches for key in batch.keys]
        for at in range(0, len(keys), REMOVED_AT_ONCE):
            self._client.remove(keys[at : at + REMOVED_AT_ONCE])


def preload(client: StoreClient, load: Load) -> None:
    """Puts the values that gets of this size will read."""
    one_by_one = Load("put", load.value_bytes)
    mode = client.modes(one_by_one)[0]
    for batch in workload.source_batches(one_by_one, STOCK):
        client.put(client.prepared(batch, one_by_one, mode))
