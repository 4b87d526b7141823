"""The store for asyncio: the same methods, carried by a few threads, the quickest ones in the event loop.

Its rule: a call that is cancelled is waited for, since it uses the caller's memory and is bounded; whatever can be read
in microseconds without waiting for anybody does not change threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import TypeVar

from kvstore.client.connecting import CONNECT_TIMEOUT_S, connect
from kvstore.client.fate import Fate
from kvstore.client.keys import Key
from kvstore.client.pool import NodeView, PoolStats
from kvstore.client.store import LEASE_TTL_S, KvStore, ReplicaChange, Value
from kvstore.client.store_lease import StoreLease
from kvstore.disk.base import Pin
from protocol.tls import TlsFiles
from transfer import Segment, TransferOptions
from transfer.buffers import Registrable

T = TypeVar("T")

_NUM_THREADS = 8
"""Calls at once; they mostly wait for nodes."""
_INLINE_BYTES = 256 * 1024
"""Copied and verified within 50 µs, which is what changing threads costs."""


async def connect_async(
    url: str,
    *,
    cluster_token: str | None = None,
    options: TransferOptions | None = None,
    tls: TlsFiles | None = None,
    timeout_s: float = CONNECT_TIMEOUT_S,
) -> AsyncKvStore:
    """As `connect`."""
    make = partial(
        connect, url, cluster_token=cluster_token, options=options, tls=tls, timeout_s=timeout_s
    )
    return AsyncKvStore(await asyncio.to_thread(make))


class AsyncKvStore:
    """See `KvStore` for what each method does. Belongs to one event loop."""

    def __init__(self, store: KvStore) -> None:
        self._store = store
        self._threads = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "kvstore call")

    async def get(
        self, key: Key, *, timeout_s: float | None = None, verify: bool = True
    ) -> bytes | None:
        value = self._store.get_at_once(key, verify=verify, max_bytes=_INLINE_BYTES)
        if not isinstance(value, Fate):
            return value
        return await self._call(self._store.get, key, timeout_s=timeout_s, verify=verify)

    async def batch_get(
        self, keys: Sequence[Key], *, timeout_s: float | None = None, verify: bool = True
    ) -> list[bytes | None]:
        return await self._call(self._store.batch_get, keys, timeout_s=timeout_s, verify=verify)

    async def get_into(
        self,
        key: Key,
        segment: Segment,
        offset: int = 0,
        length: int | None = None,
        *,
        timeout_s: float | None = None,
        verify: bool = True,
    ) -> int | None:
        get_into = partial(self._store.get_into, timeout_s=timeout_s, verify=verify)
        return await self._call(get_into, key, segment, offset, length)

    async def batch_get_into(
        self,
        keys: Sequence[Key],
        segment: Segment,
        offsets: Sequence[int],
        lengths: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
        verify: bool = True,
    ) -> list[int | None]:
        get_into = partial(self._store.batch_get_into, timeout_s=timeout_s, verify=verify)
        return await self._call(get_into, keys, segment, offsets, lengths)

    async def get_range(
        self, key: Key, offset: int, length: int, *, timeout_s: float | None = None
    ) -> bytes | None:
        return await self._call(self._store.get_range, key, offset, length, timeout_s=timeout_s)

    def lease(
        self,
        keys: Sequence[Key],
        *,
        ttl_s: float = LEASE_TTL_S,
        timeout_s: float | None = None,
        verify: bool = True,
    ) -> AsyncStoreLease:
        """`async with store.lease(keys) as lease: lease.views[0]`."""
        take = partial(self._store.lease, keys, ttl_s=ttl_s, timeout_s=timeout_s, verify=verify)
        return AsyncStoreLease(self, take)

    async def exists(self, key: Key, *, timeout_s: float | None = None) -> bool:
        present = self._store.exists_at_once(key)
        if not isinstance(present, Fate):
            return present
        return await self._call(self._store.exists, key, timeout_s=timeout_s)

    async def batch_exists(
        self, keys: Sequence[Key], *, timeout_s: float | None = None
    ) -> list[bool]:
        return await self._call(self._store.batch_exists, keys, timeout_s=timeout_s)

    async def put(
        self,
        key: Key,
        value: Value,
        *,
        pin: Pin | str = Pin.NONE,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> None:
        put = partial(self._store.put, pin=pin, tenant=tenant, timeout_s=timeout_s)
        await self._call(put, key, value)

    async def batch_put(
        self,
        items: Iterable[tuple[Key, Value]],
        *,
        pin: Pin | str = Pin.NONE,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> None:
        put = partial(self._store.batch_put, pin=pin, tenant=tenant, timeout_s=timeout_s)
        await self._call(put, items)

    async def put_from(
        self,
        key: Key,
        segment: Segment,
        offset: int = 0,
        length: int | None = None,
        *,
        pin: Pin | str = Pin.NONE,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> None:
        put = partial(self._store.put_from, pin=pin, tenant=tenant, timeout_s=timeout_s)
        await self._call(put, key, segment, offset, length)

    async def batch_put_from(
        self,
        keys: Sequence[Key],
        segment: Segment,
        offsets: Sequence[int],
        lengths: Sequence[int],
        *,
        pin: Pin | str = Pin.NONE,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> None:
        put = partial(self._store.batch_put_from, pin=pin, tenant=tenant, timeout_s=timeout_s)
        await self._call(put, keys, segment, offsets, lengths)

    async def allocate(self, nbytes: int) -> Segment:
        return await self._call(self._store.allocate, nbytes)

    def register(self, buffer: Registrable) -> Segment:
        return self._store.register(buffer)

    def deregister(self, segment: Segment) -> None:
        self._store.deregister(segment)

    async def remove(self, key: Key, *, timeout_s: float | None = None) -> bool:
        return await self._call(self._store.remove, key, timeout_s=timeout_s)

    async def batch_remove(self, keys: Sequence[Key], *, timeout_s: float | None = None) -> int:
        return await self._call(self._store.batch_remove, keys, timeout_s=timeout_s)

    async def pin(
        self, keys: Sequence[Key], kind: Pin | str, *, timeout_s: float | None = None
    ) -> int:
        return await self._call(self._store.pin, keys, kind, timeout_s=timeout_s)

    async def change_replica(
        self, keys: Sequence[Key], num_replicas: int, *, timeout_s: float | None = None
    ) -> ReplicaChange:
        change = self._store.change_replica
        return await self._call(change, keys, num_replicas, timeout_s=timeout_s)

    async def stats(self, *, timeout_s: float | None = None) -> PoolStats:
        return await self._call(self._store.stats, timeout_s=timeout_s)

    def nodes(self) -> tuple[NodeView, ...]:
        return self._store.nodes()

    async def close(self) -> None:
        await self._call(self._store.close)
        self._threads.shutdown()

    async def __aenter__(self) -> AsyncKvStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, method: Callable[..., T], *args: object, **options: object) -> T:
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._threads, partial(method, *args, **options))
        return await _to_the_end(call)


class AsyncStoreLease:
    """A `StoreLease` that is taken when the block begins and given back when it ends."""

    def __init__(self, store: AsyncKvStore, take: Callable[[], StoreLease]) -> None:
        self._store = store
        self._take = take
        self._lease: StoreLease | None = None

    async def __aenter__(self) -> StoreLease:
        taken: list[StoreLease] = []
        try:
            await self._store._call(lambda: taken.append(self._take()))
        except asyncio.CancelledError:
            for lease in taken:
                await self._store._call(lease.close)
            raise
        [self._lease] = taken
        return self._lease

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._lease is not None:
            await self._store._call(self._lease.__exit__, kind, error, trace)


async def _to_the_end(call: asyncio.Future[T]) -> T:
    """What `call` gives. When cancelled it is waited for all the same, and the cancellation then goes on."""
    cancelled: asyncio.CancelledError | None = None
    while not call.done():
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # told below
            break
    if cancelled is None:
        return call.result()
    if not call.cancelled():
        call.exception()  # looked at, so that nobody is told that it was not
    raise cancelled
