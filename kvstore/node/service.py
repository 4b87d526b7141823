"""RPC service of a store node: serves calls from the state, opens and closes write windows, verifies checksums.

The shell around the pure state: it awaits and reads the clock. The state decides each call without awaiting. Long work,
such as verifying gigabytes, runs in threads, so that the event loop stays responsive. The service never touches an
object's bytes except to compare them.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from moonserve.kvstore import wire
from moonserve.kvstore.client.blocks import BlockStores
from moonserve.kvstore.config import StoreConfig
from moonserve.kvstore.node import event_log
from moonserve.kvstore.node.copier import Copier
from moonserve.kvstore.node.event_log import EventLog
from moonserve.kvstore.node.inline_puts import LocalWrites
from moonserve.kvstore.node.removal_store import RemovalStore
from moonserve.kvstore.node.remove_pin_drain import DrainMark, DurableCalls
from moonserve.kvstore.node.tier_mover import TierMover
from moonserve.kvstore.node.verification import PutVerifier, Verifier, batched
from moonserve.kvstore.published_index import IndexSegments
from moonserve.kvstore.state import objects
from moonserve.kvstore.state.objects import Reservation, StoredObject
from moonserve.kvstore.state.removals import RemovalLog
from moonserve.kvstore.state.state import StoreState
from moonserve.protocol.errors import Overloaded
from moonserve.protocol.kv_blocks import KEY_BYTES, BlockKey, pack_keys
from moonserve.protocol.pb import conductor_pb2, kvstore_pb2
from moonserve.protocol.process.event_loop import BackgroundTasks, Timer, wait_event
from moonserve.protocol.request import Endpoint
from moonserve.protocol.rpc.grpc_transport import Channels, Context
from moonserve.protocol.rpc.wire import endpoint_to_wire, to_message
from moonserve.transfer import Segment, TransferEngine

log = logging.getLogger(__name__)

# Verification is bound by memory bandwidth: more threads would only compete for it.
NUM_THREADS = 2
# How long a call waits for demotions to disk to free memory before cold objects are evicted instead.
ROOM_WAIT_S = 0.5
DRAINING_RETRY_S = 5.0
OBJECTS_PER_MESSAGE = 2_000
# Keys of a `Touch` that are handled between turns of the loop: 0.02 ms with LRU, 0.2 ms with a policy in Python.
TOUCHED_BYTES = 128 * KEY_BYTES

T = TypeVar("T")


class StoreService(DurableCalls):
    """Serves the KvStore RPCs of one segment. The `endpoint` passed in needs no rpc_address."""

    def __init__(
        self,
        config: StoreConfig,
        transfer: TransferEngine,
        segment: Segment,
        endpoint: Endpoint,
        state: StoreState,
        index: IndexSegments,
        log: EventLog,
        clock: Callable[[], float] = time.monotonic,
        peers: Channels | None = None,
    ) -> None:
        self._config = config
        self._transfer = transfer
        self._segment = segment
        self._endpoint = endpoint
        self._state = state
        self._index = index
        self._events = log
        self._clock = clock
        self._peers = peers or Channels(config.cluster_token, config.tls())
        self._client = BlockStores(self._peers, transfer, attaches=False)
        self.mover = TierMover(state, segment.buffer, self._on_change, write_through=config.ssd_write_through)
        self.lean_address = self.lean_unix_address = ""  # known once the process listens
        ssd = config.ssd_folder()
        folder = ssd[0] if ssd is not None else None
        self._drain_mark = DrainMark(folder)
        self.draining = self._drain_mark.is_set()
        removals = RemovalLog(secrets.randbits(63), clock(), kept_s=config.removals_kept_s)
        self.removal_store = RemovalStore(state, self.mover, removals, folder, clock, self._on_change)
        self._landings = PutVerifier(transfer, segment)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kvstore")
        self._commits: dict[str, asyncio.Task[tuple[BlockKey, ...]]] = {}
        self._tasks = BackgroundTasks()
        self._timer = Timer(self._expire, clock)
        self._writer_ended = asyncio.Event()  # replaced at each end
        self.local_writes = LocalWrites(
            state,
            self.mover,
            clock,
            admit=self._admit_writer,
            changed=self._on_change,
            ended=self._writer_has_ended,
        )
        self._copier = Copier(self._client, state, self.removal_store, segment, self.local_writes)

    def load(self) -> conductor_pb2.Load:
        """Returns the load in blocks of the mean size of the objects stored now, since a store knows no layout."""
        usage = self._state.catalog.usage()
        in_memory = usage.num_objects - usage.num_on_disk
        mean = (usage.held_bytes + usage.leased_bytes) // in_memory if in_memory else 0
        return conductor_pb2.Load(
            free_blocks=usage.free_bytes // mean if mean else 0,
            held_blocks=usage.num_objects - usage.num_leased,
            leased_blocks=usage.num_leased,
            free_bytes=usage.free_bytes,
            capacity_bytes=usage.capacity_bytes,
        )

    async def Reserve(
        self, request: kvstore_pb2.StoreReserveRequest, context: Context
    ) -> kvstore_pb2.StoreReserveReply:
        self._admit_writer()
        give_up_at = self._clock() + request.wait_s
        needed = self._state.bytes_to_write(wire.put_requests_from_wire(request))
        if self._state.should_wait_for_memory(needed):
            await self.mover.wait_for_memory(needed, ROOM_WAIT_S)
        reservation = self._reserve(request)
        while reservation.waits_for_others and self._clock() < give_up_at:
            await wait_event(self._writer_ended, give_up_at - self._clock())
            reservation = self._reserve(request)
        return wire.reservation_to_wire(reservation, self._segment.segment_id)

    async def Commit(self, request: kvstore_pb2.StoreCommitRequest, context: Context) -> kvstore_pb2.StoreCommitReply:
        reservation_id = request.reservation_id
        task = self._commits.get(reservation_id)
        if task is None:
            checksums = wire.checksums_from_wire(request)
            corrupt = self._state.reservations.commit(reservation_id, checksums, self._clock())
            if corrupt is not None:
                return kvstore_pb2.StoreCommitReply(corrupt=corrupt)
            window_id, landed = self._state.reservations.objects_to_verify(reservation_id)
            if self._landings.close_if_small(window_id, landed):
                corrupt = self._verified(reservation_id, landed, self._landings.corrupt_keys(landed))
                return kvstore_pb2.StoreCommitReply(corrupt=corrupt)
            task = self._tasks.start(self._verify(reservation_id, window_id, landed))
            self._commits[reservation_id] = task
        # The commit goes on when its caller disconnects.
        return kvstore_pb2.StoreCommitReply(corrupt=await asyncio.shield(task))

    async def Abort(self, request: kvstore_pb2.StoreAbortRequest, context: Context) -> kvstore_pb2.StoreAbortReply:
        reservation = self._state.reservations.abort(request.reservation_id, self._clock())
        if reservation is not None:
            await asyncio.shield(self._tasks.start(self._reclaim(reservation)))
        return kvstore_pb2.StoreAbortReply()

    async def Lease(self, request: kvstore_pb2.StoreLeaseRequest, context: Context) -> kvstore_pb2.StoreLeaseReply:
        keys = wire.keys_from_wire(request.keys)
        needed = self._state.leases.bytes_to_read(keys)
        if needed and self._state.should_wait_for_memory(needed):
            await self.mover.wait_for_memory(needed, ROOM_WAIT_S)
        ttl_s = request.ttl_s or self._config.lease_ttl_s
        lease = self._state.leases.grant(request.lease_id, keys, ttl_s, self._clock())
        if needed:
            lease = await self._wait_until_in_memory(lease)
        self._events.report_reads(pack_keys([stored.key for stored in lease.objects]))
        self._on_change()
        return wire.lease_to_wire(lease, self._segment.segment_id)

    async def _wait_until_in_memory(self, lease: objects.Lease) -> objects.Lease:
        self.mover.start_reads(lease.loads)
        self._on_change()
        await self.mover.wait_for_reads(lease)
        return self._state.leases.settle(lease.lease_id) if lease.objects else lease

    async def Renew(self, request: kvstore_pb2.StoreRenewRequest, context: Context) -> kvstore_pb2.StoreRenewReply:
        ttl_s = request.ttl_s or self._config.lease_ttl_s
        self._state.leases.renew(request.lease_id, ttl_s, self._clock())
        return kvstore_pb2.StoreRenewReply()

    async def Release(
        self, request: kvstore_pb2.StoreReleaseRequest, context: Context
    ) -> kvstore_pb2.StoreReleaseReply:
        self._state.leases.release(request.lease_id, self._clock())
        self._on_change()
        return kvstore_pb2.StoreReleaseReply()

    async def Exists(self, request: kvstore_pb2.StoreExistsRequest, context: Context) -> kvstore_pb2.StoreExistsReply:
        present = self._state.catalog.present(wire.keys_from_wire(request.keys))
        return kvstore_pb2.StoreExistsReply(present=present)

    async def Find(self, request: kvstore_pb2.StoreFindRequest, context: Context) -> kvstore_pb2.StoreFindReply:
        keys = wire.keys_from_wire(request.keys)
        return wire.entries_to_wire(self._state.catalog.entry(key) for key in keys)

    async def Stats(self, request: kvstore_pb2.StoreStatsRequest, context: Context) -> kvstore_pb2.StoreStatsReply:
        return to_message(
            kvstore_pb2.StoreStatsReply,
            self._state.catalog.usage(),
            counters=self._state.counters,
            endpoint=endpoint_to_wire(self._endpoint),
            metadata_bytes=self._state.catalog.metadata_bytes,
            draining=self.draining,
            recovered=self.mover.recovered,
            disk_health=self.mover.health if self.mover.disk else "none",
        )

    async def Describe(
        self, request: kvstore_pb2.StoreDescribeRequest, context: Context
    ) -> kvstore_pb2.StoreDescribeReply:
        return kvstore_pb2.StoreDescribeReply(
            endpoint=endpoint_to_wire(self._endpoint),
            segment_id=self._segment.segment_id,
            index_segment_id=self._index.segment_id,
            lean_address=self.lean_address,
            lean_unix_address=self.lean_unix_address,
        )

    async def Touch(self, request: kvstore_pb2.StoreTouchRequest, context: Context) -> kvstore_pb2.StoreTouchReply:
        keys = wire.packed_keys_from_wire(request.keys)
        self._state.catalog.evictor.advance(self._clock())
        for first in reversed(range(0, len(keys), TOUCHED_BYTES)):  # a chain's head is used last
            self._state.record_uses(keys[first : first + TOUCHED_BYTES])
            if first:
                await asyncio.sleep(0)
        self._events.report_reads(keys)
        return kvstore_pb2.StoreTouchReply()

    async def Prefetch(
        self, request: kvstore_pb2.StorePrefetchRequest, context: Context
    ) -> kvstore_pb2.StorePrefetchReply:
        keys = wire.keys_from_wire(request.keys)
        needed = self._state.leases.bytes_to_read(keys)
        if self._state.should_wait_for_memory(needed):
            await self.mover.wait_for_memory(needed, ROOM_WAIT_S)
        loads = self._state.leases.prefetch(keys)
        self.mover.start_reads(loads)
        self._on_change()
        return kvstore_pb2.StorePrefetchReply(num_loading=len(loads))

    async def Copy(self, request: kvstore_pb2.StoreCopyRequest, context: Context) -> kvstore_pb2.StoreCopyReply:
        self._admit_writer()
        return await self._copier.copy(request)

    async def Subscribe(
        self, request: kvstore_pb2.StoreSubscribeRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.StoreEvents]:
        epoch = self._endpoint.epoch
        async for events in event_log.subscription_messages(self._events, self._state, epoch, request):
            yield events

    async def List(
        self, request: kvstore_pb2.StoreListRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.StoreListReply]:
        if request.key:
            [key] = wire.keys_from_wire([request.key])
            stored = self._state.catalog.find(key)
            yield wire.listing_to_wire(self._state, [stored] if stored else [])
            return
        for piece in batched(self._state.catalog.objects(), OBJECTS_PER_MESSAGE):
            yield wire.listing_to_wire(self._state, piece)
            await asyncio.sleep(0)

    async def Verify(
        self, request: kvstore_pb2.StoreVerifyRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.StoreVerifyReply]:
        verifier = Verifier(self._state, self.mover, self._segment, self._in_thread)
        async for found in verifier.run():
            self._on_change()
            yield found

    def end_streams(self) -> None:
        """Ends the event streams of all followers, so that the server need not cut them off."""
        self._events.close()

    async def close(self) -> None:
        """Waits for running tasks, flushes to disk and frees all resources. Call it once no more calls come in."""
        await asyncio.gather(*self._tasks, return_exceptions=True)  # their callers have the errors already
        await self._client.close()
        await self._peers.close()
        missing = await self.mover.flush(self._config.ssd_flush_s)
        if missing:
            log.warning("%d objects did not reach the disk in time and are lost", missing)
        await self.removal_store.close()
        await self.mover.close()
        self._timer.set(None)
        self._threads.shutdown()

    def _reserve(self, request: kvstore_pb2.StoreReserveRequest) -> Reservation:
        puts = wire.put_requests_from_wire(request)
        ttl_s = request.ttl_s or self._config.reservation_ttl_s
        reservation = self._state.reservations.reserve(request.reservation_id, puts, ttl_s, self._clock())
        if reservation.window_id is None and reservation.ranges:
            reservation.window_id = self._transfer.open_window(self._segment, reservation.ranges)
        self._on_change()
        return reservation

    async def _verify(
        self, reservation_id: str, window_id: int | None, landed: Sequence[StoredObject]
    ) -> tuple[BlockKey, ...]:
        try:
            corrupt = await self._in_thread(lambda: self._landings.close_and_verify(window_id, landed))
            return self._verified(reservation_id, landed, corrupt)
        finally:
            del self._commits[reservation_id]

    def _verified(
        self, reservation_id: str, landed: Sequence[StoredObject], corrupt: tuple[BlockKey, ...]
    ) -> tuple[BlockKey, ...]:
        """Records the result of a verification behind a closed window. Returns the corrupt keys."""
        self._state.reservations.verified(reservation_id, corrupt, self._clock())
        self.mover.enqueue_copies(item.key for item in landed)
        if corrupt:
            log.error("%d of %d objects arrived corrupt; dropped", len(corrupt), len(landed))
        self._writer_has_ended()
        return corrupt

    async def _reclaim(self, reservation: Reservation) -> None:
        """Closes the window of a reservation that was given up, then frees its space."""
        window_id = reservation.window_id
        if window_id is not None:
            await self._in_thread(lambda: self._transfer.close_window(window_id))
        self._state.reservations.window_closed(reservation.reservation_id, self._clock())
        self._writer_has_ended()

    def _admit_writer(self) -> None:
        """Raises Overloaded while the node is draining."""
        if self.draining:
            raise Overloaded("this store node is being drained", retry_after_s=DRAINING_RETRY_S)

    def _writer_has_ended(self) -> None:
        self._writer_ended.set()
        self._writer_ended = asyncio.Event()
        self._on_change()

    def _on_change(self) -> None:
        """Starts the disk writes that are due, and sets the timer to the state's next deadline."""
        self.mover.start_due_writes()
        self._timer.set(self._state.next_deadline())

    def _expire(self) -> None:
        for reservation in self._state.expire(self._clock()):
            log.warning("writer abandoned reservation %s", reservation.reservation_id)
            self._tasks.start(self._reclaim(reservation))
        self._on_change()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
