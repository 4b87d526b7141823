"""Large values that contain their number, and calls that are retried while the store is full or does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from benchmarks.transfer.workload import Bytes, pattern
from kvstore.client import KvStore
from protocol.errors import Overloaded, PeerLost
from transfer import Segment

T = TypeVar("T")

BATCH_BYTES = 16 << 20
RETRY_S = 0.02
"""Shorter than the store requests, because there is no other load."""
PATIENCE_S = 60.0
"""A store that has no room, or does not answer, for this long is broken."""


class Values:
    """Values 0, 1, 2, … of `length` bytes, which differ in the first eight bytes; put and compared in batches."""

    def __init__(self, store: KvStore, length: int) -> None:
        self._store, self._length = store, length
        self.batch = max(1, BATCH_BYTES // length)
        self._segment: Segment = store.allocate(self.batch * length)
        self._rows: Bytes = np.frombuffer(self._segment.buffer, np.uint8).reshape(-1, length)
        self._tail = pattern()[: length - 8]
        self._offsets = [place * length for place in range(self.batch)]

    def put(self, numbers: Sequence[int]) -> None:
        """Puts at most one batch. Raises Overloaded if the store stays full."""
        self._rows[:, 8:] = self._tail
        for row, number in zip(self._rows, numbers, strict=False):
            row[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
        keys = [key(number) for number in numbers]
        lengths = [self._length] * len(keys)
        patiently(
            lambda: self._store.batch_put_from(
                keys, self._segment, self._offsets[: len(keys)], lengths, timeout_s=PATIENCE_S
            )
        )

    def num_wrong(self, numbers: Sequence[int]) -> tuple[int, int]:
        """Reads at most one batch; returns how many values are present, and how many of these have wrong bytes."""
        self._rows[:] = 0
        keys = [key(number) for number in numbers]
        offsets = self._offsets[: len(keys)]
        lengths = [self._length] * len(keys)
        landed = patiently(
            lambda: self._store.batch_get_into(keys, self._segment, offsets, lengths, timeout_s=PATIENCE_S)
        )
        there = [place for place, length in enumerate(landed) if length is not None]
        wrong = sum(not self._is(self._rows[place], numbers[place]) for place in there)
        return len(there), wrong

    def close(self) -> None:
        del self._rows
        self._store.deregister(self._segment)

    def _is(self, row: Bytes, number: int) -> bool:
        stamp = int.from_bytes(row[:8].tobytes(), "little")
        return stamp == number and bool(np.array_equal(row[8:], self._tail))


def key(number: int) -> bytes:
    return b"value-%d" % number


def patiently(call: Callable[[], T]) -> T:
    """Retries while the store makes room, or while a node rests after it was slow. Raises Overloaded or PeerLost after
    `PATIENCE_S`."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except (Overloaded, PeerLost):
            if time.monotonic() > give_up_at:
                raise
            time.sleep(RETRY_S)
