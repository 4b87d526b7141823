"""The asyncio client of the KV store: the methods of `KvStore`, run in a few threads.

A cancelled call is awaited to its end, since it uses the caller's memory and is bounded in time. Reads that take
microseconds and need no waiting run in the event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from moonserve.kvstore.client.cluster import NodeView
from moonserve.kvstore.client.connecting import connect
from moonserve.kvstore.client.node_access.background import await_despite_cancellation
from moonserve.kvstore.client.node_access.objects import Key, ReadMiss
from moonserve.kvstore.client.store import KvStore
from moonserve.kvstore.client.store_lease import StoreLease
from moonserve.transfer import Segment
from moonserve.transfer.memory.segments import Registrable

T = TypeVar("T")
P = ParamSpec("P")

_NUM_THREADS = 8
"""Concurrent calls; they mostly wait for nodes."""
_IN_LOOP_BYTES = 256 * 1024
"""Largest value read in the event loop: copied and verified within 50 µs, the cost of changing threads."""


def _threaded(
    method: Callable[Concatenate[KvStore, P], T],
) -> Callable[Concatenate[AsyncKvStore, P], Coroutine[Any, Any, T]]:
    """Returns an async method that calls the given method in one of the store's threads."""

    @wraps(method)
    async def call(self: AsyncKvStore, /, *args: P.args, **options: P.kwargs) -> T:
        return await self._call(partial(method, self._store, *args, **options))

    return call


def _leasing(
    method: Callable[Concatenate[KvStore, P], StoreLease],
) -> Callable[Concatenate[AsyncKvStore, P], AbstractAsyncContextManager[StoreLease]]:
    """Returns an async context manager of a lease: `async with store.lease(keys) as lease: lease.views[0]`.

    The lease is taken when the block begins and released when it ends.
    """

    @asynccontextmanager
    async def lease(self: AsyncKvStore, /, *args: P.args, **options: P.kwargs) -> AsyncIterator[StoreLease]:
        taken: list[StoreLease] = []
        try:
            await self._call(lambda: taken.append(method(self._store, *args, **options)))
            yield taken[0]
        except BaseException:  # also on cancellation
            for each in taken:
                await self._call(each.close)
            raise
        await self._call(partial(taken[0].__exit__, None, None, None))

    return lease


async def connect_async(url: str, **options: Any) -> AsyncKvStore:
    """Connects to a store, as `connect`, without blocking the event loop."""
    return AsyncKvStore(await asyncio.to_thread(partial(connect, url, **options)))


class AsyncKvStore(AbstractAsyncContextManager["AsyncKvStore"]):
    """Asyncio client of a KV store. Belongs to one event loop. `KvStore` documents each method."""

    def __init__(self, store: KvStore) -> None:
        self._store = store
        self._threads = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "kvstore call")

    async def get(self, key: Key, *, timeout_s: float | None = None, verify: bool = True) -> bytes | None:
        value = self._store.get_at_once(key, verify=verify, max_bytes=_IN_LOOP_BYTES)
        if not isinstance(value, ReadMiss):
            return value
        return await self._call(partial(self._store.get, key, timeout_s=timeout_s, verify=verify))

    async def exists(self, key: Key, *, timeout_s: float | None = None) -> bool:
        present = self._store.exists_at_once(key)
        if not isinstance(present, ReadMiss):
            return present
        return await self._call(partial(self._store.exists, key, timeout_s=timeout_s))

    batch_get = _threaded(KvStore.batch_get)
    get_into = _threaded(KvStore.get_into)
    batch_get_into = _threaded(KvStore.batch_get_into)
    get_range = _threaded(KvStore.get_range)
    lease = _leasing(KvStore.lease)
    batch_exists = _threaded(KvStore.batch_exists)
    put = _threaded(KvStore.put)
    batch_put = _threaded(KvStore.batch_put)
    put_from = _threaded(KvStore.put_from)
    batch_put_from = _threaded(KvStore.batch_put_from)
    allocate = _threaded(KvStore.allocate)
    remove = _threaded(KvStore.remove)
    batch_remove = _threaded(KvStore.batch_remove)
    pin = _threaded(KvStore.pin)
    change_replica = _threaded(KvStore.change_replica)
    stats = _threaded(KvStore.stats)

    def register(self, buffer: Registrable) -> Segment:
        return self._store.register(buffer)

    def deregister(self, segment: Segment) -> None:
        self._store.deregister(segment)

    def nodes(self) -> tuple[NodeView, ...]:
        return self._store.nodes()

    async def close(self) -> None:
        await self._call(self._store.close)
        self._threads.shutdown()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, call: Callable[[], T]) -> T:
        return await await_despite_cancellation(asyncio.get_running_loop().run_in_executor(self._threads, call))
