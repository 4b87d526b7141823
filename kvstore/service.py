"""A store node's process: gRPC in, state asked, memory opened and closed to writers, checksums verified.

The only part that awaits and reads the clock. Each call is decided by the state without awaiting; closing a window and
comparing checksums run in threads, so that the loop stays responsive while gigabytes are verified. It never touches
an object's bytes except to compare them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc.aio

from kvstore import eviction, wire
from kvstore.catalog import Announcements, Usage
from kvstore.config import StoreConfig
from kvstore.state import Landed, Reservation, StoreState
from protocol.checksum import checksum
from protocol.keys import BlockKey
from protocol.pb import conductor_pb2, kvstore_pb2, kvstore_pb2_grpc
from protocol.request import Endpoint
from protocol.timer import Timer
from transfer import Segment, TransferEngine

log = logging.getLogger(__name__)

# Verifying runs at memory speed: more threads than this only take it from each other.
NUM_THREADS = 2

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


class StoreService(kvstore_pb2_grpc.KvStoreServicer):
    """Answers calls about one segment.

    `endpoint` needs no rpc_address. `on_change` is called after each call that may have changed the state.
    """

    def __init__(
        self,
        config: StoreConfig,
        transfer: TransferEngine,
        segment: Segment,
        endpoint: Endpoint,
        announce: Announcements,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._transfer = transfer
        self._segment = segment
        self._endpoint = endpoint
        self._on_change = on_change
        self._clock = clock
        self._state = StoreState(
            segment.nbytes,
            policy=eviction.make(config.eviction_policy),
            announce=announce,
            watermarks=config.watermarks(),
        )
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kvstore")
        self._commits: dict[str, asyncio.Task[tuple[BlockKey, ...]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer = Timer(self._expire, clock)
        self._writer_ended = asyncio.Event()  # replaced at each end

    @property
    def counters(self) -> dict[str, int]:
        return dict(self._state.counters)

    def usage(self) -> Usage:
        return self._state.usage()

    def load(self) -> conductor_pb2.Load:
        """In blocks of the mean size of what is stored now, since a store knows no layout."""
        usage = self._state.usage()
        mean = (usage.held + usage.leased) // usage.num_objects if usage.num_objects else 0
        return conductor_pb2.Load(
            free_blocks=usage.free // mean if mean else 0,
            held_blocks=usage.num_objects - usage.num_leased,
            leased_blocks=usage.num_leased,
        )

    async def Reserve(
        self, request: kvstore_pb2.StoreReserveRequest, context: Context
    ) -> kvstore_pb2.StoreReserveReply:
        give_up_at = self._clock() + request.wait_s
        reservation = self._reserve(request)
        while reservation.waits_for_others and self._clock() < give_up_at:
            await _wait(self._writer_ended, give_up_at - self._clock())
            reservation = self._reserve(request)
        return wire.reservation_to_wire(reservation, self._segment.segment_id)

    async def Commit(
        self, request: kvstore_pb2.StoreCommitRequest, context: Context
    ) -> kvstore_pb2.StoreCommitReply:
        reservation_id = request.reservation_id
        task = self._commits.get(reservation_id)
        if task is None:
            checksums = wire.checksums_from_wire(request)
            corrupt = self._state.commit(reservation_id, checksums, self._clock())
            if corrupt is not None:
                return kvstore_pb2.StoreCommitReply(corrupt=corrupt)
            task = self._hold(self._finish_commit(reservation_id))
            self._commits[reservation_id] = task
        # The caller may go away; what it committed is committed.
        return kvstore_pb2.StoreCommitReply(corrupt=await asyncio.shield(task))

    async def Abort(
        self, request: kvstore_pb2.StoreAbortRequest, context: Context
    ) -> kvstore_pb2.StoreAbortReply:
        reservation = self._state.abort(request.reservation_id, self._clock())
        if reservation is not None:
            await asyncio.shield(self._hold(self._reclaim(reservation)))
        return kvstore_pb2.StoreAbortReply()

    async def Lease(
        self, request: kvstore_pb2.StoreLeaseRequest, context: Context
    ) -> kvstore_pb2.StoreLeaseReply:
        keys = wire.keys_from_wire(request.keys)
        ttl_s = request.ttl_s or self._config.lease_ttl_s
        lease = self._state.lease(request.lease_id, keys, ttl_s, self._clock())
        self._changed()
        return wire.lease_to_wire(lease, self._segment.segment_id)

    async def Renew(
        self, request: kvstore_pb2.StoreRenewRequest, context: Context
    ) -> kvstore_pb2.StoreRenewReply:
        ttl_s = request.ttl_s or self._config.lease_ttl_s
        self._state.renew(request.lease_id, ttl_s, self._clock())
        return kvstore_pb2.StoreRenewReply()

    async def Release(
        self, request: kvstore_pb2.StoreReleaseRequest, context: Context
    ) -> kvstore_pb2.StoreReleaseReply:
        self._state.release(request.lease_id, self._clock())
        self._changed()
        return kvstore_pb2.StoreReleaseReply()

    async def Exists(
        self, request: kvstore_pb2.StoreExistsRequest, context: Context
    ) -> kvstore_pb2.StoreExistsReply:
        present = self._state.exists(wire.keys_from_wire(request.keys))
        return kvstore_pb2.StoreExistsReply(present=present)

    async def Remove(
        self, request: kvstore_pb2.StoreRemoveRequest, context: Context
    ) -> kvstore_pb2.StoreRemoveReply:
        keys = wire.keys_from_wire(request.keys)
        removed = self._state.remove(keys, corrupt=request.corrupt)
        if request.corrupt and removed:
            log.error("a reader found %d of %d objects corrupt; dropped", removed, len(keys))
        self._changed()
        return kvstore_pb2.StoreRemoveReply(removed=removed)

    async def Stats(
        self, request: kvstore_pb2.StoreStatsRequest, context: Context
    ) -> kvstore_pb2.StoreStatsReply:
        return wire.usage_to_wire(self._state.usage(), self._state.counters, self._endpoint)

    async def close(self) -> None:
        """Waits for what is under way; call it once no more calls come in."""
        await asyncio.gather(*self._tasks, return_exceptions=True)  # their callers were told
        self._timer.set(None)
        self._threads.shutdown()

    def _reserve(self, request: kvstore_pb2.StoreReserveRequest) -> Reservation:
        wishes = wire.wishes_from_wire(request)
        ttl_s = request.ttl_s or self._config.reservation_ttl_s
        reservation = self._state.reserve(request.reservation_id, wishes, ttl_s, self._clock())
        if reservation.window_id is None and reservation.ranges:
            reservation.window_id = self._transfer.open_window(self._segment, reservation.ranges)
        self._changed()
        return reservation

    async def _finish_commit(self, reservation_id: str) -> tuple[BlockKey, ...]:
        window_id, landed = self._state.landed(reservation_id)
        try:
            corrupt = await self._in_thread(lambda: self._close_and_verify(window_id, landed))
            self._state.verified(reservation_id, corrupt, self._clock())
        finally:
            del self._commits[reservation_id]
        if corrupt:
            log.error("%d of %d objects arrived corrupt; dropped", len(corrupt), len(landed))
        self._end_of_writer()
        return corrupt

    def _close_and_verify(
        self, window_id: int | None, landed: Sequence[Landed]
    ) -> tuple[BlockKey, ...]:
        """The keys whose bytes do not match; nobody can write them any more."""
        if window_id is not None:
            self._transfer.close_window(window_id)
        memory = self._segment.buffer
        return tuple(
            item.key
            for item in landed
            if checksum([memory[item.offset : item.offset + item.length]]) != item.checksum
        )

    async def _reclaim(self, reservation: Reservation) -> None:
        """Frees the space of a reservation that was given up, once nobody can write to it."""
        window_id = reservation.window_id
        if window_id is not None:
            await self._in_thread(lambda: self._transfer.close_window(window_id))
        self._state.closed(reservation.reservation_id, self._clock())
        self._end_of_writer()

    def _end_of_writer(self) -> None:
        self._writer_ended.set()
        self._writer_ended = asyncio.Event()
        self._changed()

    def _changed(self) -> None:
        """Sets the timer to the state's next deadline, and tells who listens."""
        self._timer.set(self._state.next_deadline())
        self._on_change()

    def _expire(self) -> None:
        for reservation in self._state.expire(self._clock()):
            log.warning("writer abandoned reservation %s", reservation.reservation_id)
            self._hold(self._reclaim(reservation))
        self._changed()

    def _hold(self, body: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(body)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Until `event` is set or the time is over."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
