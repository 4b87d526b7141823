"""Reads and writes blocks at store nodes for workers, directly in the pieces of the worker's own memory (asyncio).

The caller names a node by its endpoint; no key is searched for. Every operation is bounded by its deadline. Bytes that
do not match their writer's checksum never count as read. An operation that fails or is cancelled leaves no lease and no
reservation behind, and ends only when no transfer touches the caller's memory. Does not know what the bytes mean.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from itertools import takewhile
from operator import attrgetter
from typing import Any, TypeVar, cast

from moonserve.kvstore.client.blocks_fast_path import IN_LOOP_BYTES, BlocksFastPath
from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.kvstore.client.node_access.deadline import PATIENCE, ttl_for
from moonserve.kvstore.client.node_access.lease_and_put import (
    GIVE_BACK_TIMEOUT_S,
    Call,
    PutOptions,
    Steps,
    abort_call,
    lease_steps,
    put_steps,
    release_call,
    renew_call,
)
from moonserve.kvstore.client.node_access.objects import PutObject, PutResult, ReadLease, ReadMiss, require_lengths
from moonserve.kvstore.state.objects import PutOutcome
from moonserve.protocol.errors import DeadlineExceeded, MoonserveError, PeerLost, StaleLease
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.pb import kvstore_pb2, kvstore_pb2_grpc
from moonserve.protocol.process.event_loop import BackgroundTasks
from moonserve.protocol.request import NO_HINTS, CacheHints, Endpoint, new_id
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.protocol.rpc.wire import endpoint_from_wire
from moonserve.transfer import Batch, Op, ScatterTransfer, TransferEngine

log = logging.getLogger(__name__)

T = TypeVar("T")


class BlockStores:
    """Client for any number of store nodes. Belongs to one event loop; `close` it before the transfer engine.

    Calls go to a node's lean server, whose address is known once the node is attached.
    """

    def __init__(self, channels: Channels, transfer: TransferEngine, *, attaches: bool = True) -> None:
        """If `attaches` is False, no memory of a node is mapped and every call goes to its published address."""
        self._channels = channels
        self._transfer = transfer
        self._attaches = attaches
        self._made: BlocksFastPath | None = None
        self._undoing = BackgroundTasks()

    async def close(self) -> None:
        """Waits until pending leases and reservations are given back, then detaches every node."""
        await asyncio.gather(*self._undoing)
        if self._made is not None:
            await self._made.close()

    async def locate(self, rpc_address: str, *, timeout_s: float = 2.0) -> Endpoint:
        """Returns the endpoint of the node that listens at `host:port`, for use without a conductor."""
        request = kvstore_pb2.StoreStatsRequest()
        stub = self._stub(rpc_address)
        reply = await self._channels.call(stub.Stats, request, timeout_s=timeout_s)
        return dataclasses.replace(endpoint_from_wire(reply.endpoint), rpc_address=rpc_address)

    async def call(self, store: Endpoint, method: str, request: Any, *, timeout_s: float = 2.0) -> Any:
        """Calls a method of the node, such as "Exists". Raises the node's own error, PeerLost, DeadlineExceeded."""
        return await self._call(store, attrgetter(method), request, timeout_s)

    # Reading

    async def read(
        self, store: Endpoint, keys: Sequence[BlockKey], slots: BufferSlots, *, deadline_s: float
    ) -> list[int]:
        """Reads the longest run of leading keys that the node holds, each into its slot, and returns their checksums.

        An object that does not match its checksum ends the run and is removed at the node. Raises PeerLost,
        DeadlineExceeded, StaleLease, InvalidRequest (objects of another length).
        """
        give_up_at = loop_time() + deadline_s
        checksums: list[int] = []
        if self._attaches:
            fates = await self._direct.read(store, keys, slots, deadline_s)
            if ReadMiss not in set(map(type, fates)):  # faster than a Python loop
                return cast("list[int]", fates)
            checksums = cast("list[int]", list(takewhile(lambda fate: not isinstance(fate, ReadMiss), fates)))
            if corrupt := [k for k, fate in zip(keys, fates, strict=True) if fate is ReadMiss.CORRUPT]:
                await self._remove_corrupt(store, corrupt)
            if fates[len(checksums)] is not ReadMiss.ASK_NODE:
                return checksums
        first = len(checksums)
        rest = slots.at(range(first, len(keys)))
        return checksums + await self._read_leased(store, keys[first:], rest, give_up_at)

    async def _read_leased(
        self, store: Endpoint, keys: Sequence[BlockKey], slots: BufferSlots, give_up_at: float
    ) -> list[int]:
        # To grant the lease, the node may have to read everything from disk.
        left_s = seconds_left(give_up_at)
        lease = await self.lease(store, keys, ttl_s=ttl_for(left_s), timeout_s=left_s)
        if not lease.objects:
            return []
        try:
            there = slots.at(range(len(lease.objects)))
            num_good = await self.read_leased(lease, there, deadline_s=seconds_left(give_up_at))
        finally:
            self.release_soon(lease)
        return [each.checksum for each in lease.objects[:num_good]]

    async def lease(
        self,
        store: Endpoint,
        keys: Sequence[BlockKey],
        *,
        ttl_s: float = 10.0,
        timeout_s: float = 2.0,
    ) -> ReadLease:
        """Leases the longest run of leading keys that the node holds. If it holds none, there is nothing to release.

        Use it to keep objects for longer, or to read their bytes in a different order.
        """
        lease_id = new_id("lease")
        try:
            steps = lease_steps(store, lease_id, keys, ttl_s, loop_time())
            return await self._run(store, steps, loop_time() + timeout_s)
        except BaseException:  # also on cancellation: the node may have granted a lease that nobody will use
            self._undo(store, release_call(lease_id))
            raise

    async def read_leased(self, lease: ReadLease, slots: BufferSlots, *, deadline_s: float) -> int:
        """Reads all leased objects, each into its slot. Returns how many leading objects match their checksum.

        Raises the same errors as `read`.
        """
        require_lengths(lease, slots)
        rows = slots.rows([each.offset for each in lease.objects])
        transfer = ScatterTransfer(Op.READ, slots.segment, lease.segment, rows)
        await self.transfer(lease, transfer, deadline_s=deadline_s)
        return await self.verify(lease, slots)

    async def transfer(self, lease: ReadLease, transfer: ScatterTransfer, *, deadline_s: float) -> None:
        """Reads bytes of leased objects. They count only after `verify`.

        When it returns or raises, no byte of it moves any more. Raises PeerLost, StaleLease (the lease expired before
        everything was read), DeadlineExceeded.
        """
        left_s = lease.expires_at - loop_time()
        if left_s <= 0:
            raise StaleLease("the read lease has expired", lease_id=lease.lease_id)
        await _wait_until_settled(self._transfer.submit([transfer], deadline_s=min(deadline_s, left_s)))

    async def verify(self, lease: ReadLease, slots: BufferSlots) -> int:
        """Returns how many leading objects match their checksum, once all their bytes were read into their slots.

        Objects that do not match are removed at the node. Raises StaleLease.
        """
        objects = lease.objects[: len(slots.offsets)]
        bad = await _mismatches(slots, [each.checksum for each in objects])
        if not bad:
            return len(objects)
        # if the lease has ended, the mismatch does not mean corruption: the objects may have been replaced
        await self.renew(lease)
        await self._remove_corrupt(lease.store, [objects[index].key for index in bad])
        return bad[0]

    async def renew(self, lease: ReadLease, *, ttl_s: float = 10.0) -> ReadLease:
        """Returns the lease with a new expiry. Raises StaleLease if it has ended."""
        expires_at = loop_time() + ttl_s
        await self._call(lease.store, *renew_call(lease.lease_id, ttl_s), GIVE_BACK_TIMEOUT_S)
        return dataclasses.replace(lease, expires_at=expires_at)

    def release_soon(self, lease: ReadLease) -> asyncio.Task[None]:
        """Gives a lease back in a task that may be awaited. No-op if the lease has ended or the node is gone."""
        return self._undo(lease.store, release_call(lease.lease_id))

    # Writing

    async def put(
        self,
        store: Endpoint,
        objects: Sequence[PutObject],
        slots: BufferSlots,
        *,
        deadline_s: float | None = None,
        hints: CacheHints = NO_HINTS,
    ) -> PutResult:
        """Stores objects, each of which fills its slot. Objects counted as stored are visible when this returns.

        Without a deadline, the limit grows with the number of bytes (`transfer.config`). When it returns or raises, no
        transfer reads from the caller's memory. Raises PeerLost, InvalidRequest (an object that could never fit),
        StaleLease, DeadlineExceeded.
        """
        if deadline_s is None:
            deadline_s = PATIENCE.deadline_s(slots.nbytes)
        give_up_at = loop_time() + deadline_s
        puts = [PutOutcome.LATER] * len(objects)
        if self._attaches and hints == NO_HINTS:  # an inline put has no field for hints
            puts = await self._direct.put(store, objects, slots, seconds_left(give_up_at))
        later = [place for place, put in enumerate(puts) if put is PutOutcome.LATER]
        if later:
            some = [objects[place] for place in later]
            written = await self._write(store, some, slots.at(later), hints, give_up_at)
            for place, put in zip(later, written, strict=True):
                puts[place] = put
        return PutResult(
            stored=puts.count(PutOutcome.STORED),
            present=puts.count(PutOutcome.PRESENT) + puts.count(PutOutcome.IN_PROGRESS),
            refused=puts.count(PutOutcome.FULL),
            corrupt=tuple(o.key for o, put in zip(objects, puts, strict=True) if put is PutOutcome.CORRUPT),
        )

    async def _write(
        self, store: Endpoint, objects: Sequence[PutObject], slots: BufferSlots, hints: CacheHints, give_up_at: float
    ) -> list[PutOutcome]:
        name = new_id("put")
        terms = PutOptions(hints=hints)
        steps = put_steps(store.transfer_address, name, objects, slots, terms, seconds_left(give_up_at))
        try:
            return await self._run(store, steps, give_up_at)
        except BaseException:  # also on cancellation: other writers wait for the space and for the keys
            self._undo(store, abort_call(name))
            raise

    @property
    def _direct(self) -> BlocksFastPath:
        if self._made is None:
            self._made = BlocksFastPath(self._channels, self._transfer)
        return self._made

    async def _call(
        self,
        store: Endpoint,
        method: Callable[[Any], Callable[..., Any]],
        request: Any,
        timeout_s: float,
    ) -> Any:
        """Calls the lean server of an attached node. Raises the node's own error, PeerLost, DeadlineExceeded."""
        give_up_at = loop_time() + timeout_s
        address = store.rpc_address
        if self._attaches:
            address = await self._direct.lean_address(store, timeout_s)
        try:
            return await self._channels.call(method(self._stub(address)), request, timeout_s=seconds_left(give_up_at))
        except PeerLost as error:
            if self._attaches:
                await self._direct.lost(store, error)
            raise

    def _stub(self, address: str) -> Any:
        return kvstore_pb2_grpc.KvStoreStub(self._channels.to(address))

    async def _remove_corrupt(self, store: Endpoint, keys: Sequence[BlockKey]) -> None:
        log.error("%d objects from %s are corrupt", len(keys), store.instance_id)
        try:
            request = kvstore_pb2.StoreRemoveRequest(keys=keys, corrupt=True)
            await self.call(store, "Remove", request)
        except MoonserveError as error:  # not fatal: the caller does not use them either way
            log.warning("corrupt objects could not be removed: %s", error)

    async def _run(self, store: Endpoint, steps: Steps[T], give_up_at: float) -> T:
        """Runs the steps and returns their result. Raises as calls and transfers do."""
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as done:
                return cast("T", done.value)
            if isinstance(step, Call):
                answer = await self._call(store, *step, seconds_left(give_up_at))
            else:
                await _wait_until_settled(self._transfer.submit([step], deadline_s=seconds_left(give_up_at)))
                answer = None

    def _undo(self, store: Endpoint, call: Call) -> asyncio.Task[None]:
        """Gives a right back in its own task, which continues after the caller ends."""
        return self._undoing.start(self._best_effort(store, call))

    async def _best_effort(self, store: Endpoint, call: Call) -> None:
        """Gives a right back if possible. Otherwise it expires at the node."""
        try:
            await self._call(store, *call, GIVE_BACK_TIMEOUT_S)
        except MoonserveError as error:
            log.info("not given back: %s", error)


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def seconds_left(give_up_at: float) -> float:
    """Returns the seconds left until `give_up_at`. Raises DeadlineExceeded if none are left."""
    left_s = give_up_at - loop_time()
    if left_s <= 0:
        raise DeadlineExceeded("the deadline passed before the operation was complete")
    return left_s


async def _wait_until_settled(batch: Batch) -> None:
    """Waits until no byte of the batch moves, even if cancelled, then raises. The batch's deadline bounds the wait."""
    cancelled: asyncio.CancelledError | None = None
    while not batch.done:
        try:
            await batch
        except asyncio.CancelledError as error:
            cancelled = error
        except MoonserveError:
            break
    if cancelled is not None:
        raise cancelled
    await batch


async def _mismatches(slots: BufferSlots, checksums: Sequence[int]) -> list[int]:
    """Returns the indexes of the objects that do not match their checksum."""

    def compare() -> list[int]:
        return [index for index, expected in enumerate(checksums) if slots.checksum(index) != expected]

    return compare() if slots.nbytes <= IN_LOOP_BYTES else await asyncio.to_thread(compare)
