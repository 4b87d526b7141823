"""This project's store through its public client: values copied into registered memory, and values read in place.

A call that fails because the node got no processor time is retried and counts as slow, not as failed.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from benchmarks.store.speed import client
from benchmarks.store.speed.workload import POOL_BYTES, Batch, Load
from benchmarks.transfer.workload import Bytes, pattern
from moonserve.kvstore.client import KvStore, connect
from moonserve.protocol.errors import Overloaded, PeerLost
from moonserve.transfer import Segment, TransferOptions

# Large values that contain their number, and calls that are retried while the store is full or does not answer.

T = TypeVar("T")

BATCH_BYTES = 16 << 20
RETRY_S = 0.02
"""Shorter than the store requests, because there is no other load."""
RETRY_TIMEOUT_S = 60.0
"""A store that has no room, or does not answer, for this long is broken."""


class NumberedValues:
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
        with_retries(
            lambda: self._store.batch_put_from(
                keys, self._segment, self._offsets[: len(keys)], lengths, timeout_s=RETRY_TIMEOUT_S
            )
        )

    def num_wrong(self, numbers: Sequence[int]) -> tuple[int, int]:
        """Reads at most one batch; returns how many values are present, and how many of these have wrong bytes."""
        self._rows[:] = 0
        keys = [key(number) for number in numbers]
        offsets = self._offsets[: len(keys)]
        lengths = [self._length] * len(keys)
        landed = with_retries(
            lambda: self._store.batch_get_into(keys, self._segment, offsets, lengths, timeout_s=RETRY_TIMEOUT_S)
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


def with_retries(call: Callable[[], T]) -> T:
    """Retries while the store makes room, or while a node rests after it was slow. Raises Overloaded or PeerLost after
    `RETRY_TIMEOUT_S`."""
    give_up_at = time.monotonic() + RETRY_TIMEOUT_S
    while True:
        try:
            return call()
        except (Overloaded, PeerLost):
            if time.monotonic() > give_up_at:
                raise
            time.sleep(RETRY_S)


Call = tuple[list[bytes], list[int], list[int]]
"""Keys, offsets and lengths."""


class Client(client.StoreClient):
    """`options`: "transport" of both ends; "verify": compare read values with their writer's checksum."""

    def __init__(self, facts: dict[str, Any], options: dict[str, Any]) -> None:
        super().__init__(facts, options)
        # The defaults of `connect`, except for the transport.
        transfers = TransferOptions(transports=(options["transport"],), checksums=False)
        self._store = connect(facts["url"], cluster_token=facts["token"], options=transfers)
        self._verify: bool = options.get("verify", True)
        self._segment = self._store.allocate(POOL_BYTES)
        self.pool = np.frombuffer(self._segment.buffer, np.uint8)

    def prepared(self, batch: Batch, load: Load, mode: str) -> Call:
        keys = [key.encode() for key in batch.keys]
        return keys, list(batch.offsets), [batch.length] * len(keys)

    def put(self, call: Call) -> None:
        put = self._store.batch_put_from
        with_retries(partial(put, call[0], self._segment, call[1], call[2], timeout_s=RETRY_TIMEOUT_S))

    def get(self, call: Call) -> None:
        keys, offsets, lengths = call
        get = partial(self._store.batch_get_into, timeout_s=RETRY_TIMEOUT_S, verify=self._verify)
        landed = with_retries(lambda: get(keys, self._segment, offsets, lengths))
        if landed != lengths:
            raise OSError(f"get gave {landed[:4]}")

    def exists(self, call: Call) -> bool:
        return with_retries(partial(self._store.exists, call[0][0], timeout_s=RETRY_TIMEOUT_S))

    def remove(self, keys: Sequence[str]) -> None:
        encoded = [key.encode() for key in keys]
        with_retries(partial(self._store.batch_remove, encoded, timeout_s=RETRY_TIMEOUT_S))

    def close(self) -> None:
        del self.pool
        self._store.close()


class InPlace(Client):
    """A get is a lease on values in place: nothing is copied, and no checksum is compared."""

    def get(self, call: Call) -> None:
        with with_retries(partial(self._store.lease, call[0], timeout_s=RETRY_TIMEOUT_S, verify=False)) as lease:
            for view in lease.views:
                if view is None:
                    raise OSError("a value that was put is not there")
                view[0]

    def got(self, call: Call, batch: Batch) -> None:
        keys, offsets, lengths = call
        with with_retries(partial(self._store.lease, keys, timeout_s=RETRY_TIMEOUT_S)) as lease:
            for view, offset, length in zip(lease.views, offsets, lengths, strict=True):
                self.pool[offset : offset + length] = np.frombuffer(view or b"", np.uint8)
