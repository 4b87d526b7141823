"""This project's store through its public client: values copied into registered memory, and values read in place.

A call that fails because the node got no processor time is retried and counts as slow, not as failed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.store import client
from benchmarks.store.values import PATIENCE_S, patiently
from benchmarks.store.workload import POOL_BYTES, Batch, Load
from kvstore.client import connect
from transfer import TransferOptions

Call = tuple[list[bytes], list[int], list[int]]
"""Keys, offsets and lengths."""


class Client(client.Client):
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
        patiently(partial(put, call[0], self._segment, call[1], call[2], timeout_s=PATIENCE_S))

    def get(self, call: Call) -> None:
        keys, offsets, lengths = call
        get = partial(self._store.batch_get_into, timeout_s=PATIENCE_S, verify=self._verify)
        landed = patiently(lambda: get(keys, self._segment, offsets, lengths))
        if landed != lengths:
            raise OSError(f"get gave {landed[:4]}")

    def exists(self, call: Call) -> bool:
        return patiently(partial(self._store.exists, call[0][0], timeout_s=PATIENCE_S))

    def remove(self, keys: Sequence[str]) -> None:
        encoded = [key.encode() for key in keys]
        patiently(partial(self._store.batch_remove, encoded, timeout_s=PATIENCE_S))

    def close(self) -> None:
        del self.pool
        self._store.close()


class InPlace(Client):
    """A get is a lease on values in place: nothing is copied, and no checksum is compared."""

    def get(self, call: Call) -> None:
        with patiently(partial(self._store.lease, call[0], timeout_s=PATIENCE_S, verify=False)) as lease:
            for view in lease.views:
                if view is None:
                    raise OSError("a value that was put is not there")
                view[0]

    def got(self, call: Call, batch: Batch) -> None:
        keys, offsets, lengths = call
        with patiently(partial(self._store.lease, keys, timeout_s=PATIENCE_S)) as lease:
            for view, offset, length in zip(lease.views, offsets, lengths, strict=True):
                self.pool[offset : offset + length] = np.frombuffer(view or b"", np.uint8)
