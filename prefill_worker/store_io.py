"""I/O between a prefill worker's pool and store nodes: reads of prefixes, whole or layer by layer, prefetches, puts.

The store client verifies the blocks that it reads. Blocks that did not arrive correctly count as missing.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from moonserve.kvstore.client.blocks import BlockStores
from moonserve.kvstore.client.node_access.deadline import ttl_for
from moonserve.kvstore.client.node_access.objects import PutObject, ReadLease
from moonserve.prefill_worker.decisions import events as ev
from moonserve.prefill_worker.decisions.events import LoadPrefix, PrefetchPrefix, PrefixPart, PutBlocks
from moonserve.protocol.errors import InvalidRequest, MoonserveError
from moonserve.protocol.pb import kvstore_pb2
from moonserve.protocol.process.logs import request_extra
from moonserve.transfer import Op, ScatterTransfer
from moonserve.transfer.config import TransferTimeout
from moonserve.transfer.memory.scatter import LENGTH, LOCAL, REMOTE, Rows
from moonserve.worker.process import KvMemory

log = logging.getLogger(__name__)

# If a store stalls for longer than this, computing the prefix is the better choice.
READ_STALL_S = 5.0


async def load_prefix(
    client: BlockStores, memory: KvMemory, action: LoadPrefix, patience: TransferTimeout
) -> ev.PrefixLoaded | ev.PrefixLoadFailed:
    """Reads the parts in order. The first missing or corrupt block ends the prefix."""
    request_id, block_bytes = action.request_id, memory.layout.block_bytes
    log.debug("the prefix is read: %s", action.choice, extra=request_extra(request_id))
    checksums: list[int] = []
    reads: list[ev.PartRead] = []
    for part in action.parts:
        outcome = await _timed(client, memory, part, patience)
        reads.append(outcome.as_read(part, block_bytes))
        checksums += outcome.checksums
        if outcome.error is not None:
            store = part.store.instance_id
            text = "prefix not read from %s: %s"
            log.warning(text, store, outcome.error, extra=request_extra(request_id))
            if not checksums:
                return ev.PrefixLoadFailed(request_id=request_id, error=outcome.error, reads=tuple(reads))
        if len(outcome.checksums) < len(part.keys):
            break
    return ev.PrefixLoaded(request_id=request_id, checksums=tuple(checksums), reads=tuple(reads))


@dataclass(frozen=True, slots=True)
class _PartOutcome:
    checksums: list[int]
    seconds: float
    error: MoonserveError | None = None

    def as_read(self, part: PrefixPart, block_bytes: int) -> ev.PartRead:
        failed = self.error is not None
        return ev.PartRead(
            store=part.store,
            num_bytes=len(part.keys if failed else self.checksums) * block_bytes,
            seconds=self.seconds,
            failed=failed,
        )


async def _timed(client: BlockStores, memory: KvMemory, part: PrefixPart, patience: TransferTimeout) -> _PartOutcome:
    began_at = time.monotonic()
    try:
        good = await _load_part(client, memory, part, patience)
    except MoonserveError as error:
        return _PartOutcome([], time.monotonic() - began_at, error)
    return _PartOutcome(good, time.monotonic() - began_at)


async def _load_part(client: BlockStores, memory: KvMemory, part: PrefixPart, patience: TransferTimeout) -> list[int]:
    """Reads one part and returns the checksums of the leading blocks that are correct."""
    patience = replace(patience, base_s=min(patience.base_s, READ_STALL_S))
    deadline_s = patience.deadline_s(len(part.keys) * memory.layout.block_bytes)
    spots = memory.spots_of(part.blocks)
    checksums = await client.read(part.store, part.keys, spots, deadline_s=deadline_s)
    await memory.staging.load(part.blocks[: len(checksums)])
    return checksums


async def prefetch(client: BlockStores, action: PrefetchPrefix) -> None:
    """Requests the stores to load a waiting request's blocks from disk. On failure they are read later, or computed."""
    for part in action.parts:
        store, whose = part.store, request_extra(action.request_id)
        try:
            request = kvstore_pb2.StorePrefetchRequest(keys=part.keys)
            reply = await client.call(store, "Prefetch", request)
        except MoonserveError as error:
            log.info("no prefetch from %s: %s", store.instance_id, error, extra=whose)
            continue
        log.debug("%s fetches %d blocks", store.instance_id, reply.num_loading, extra=whose)


async def put_blocks(
    client: BlockStores, memory: KvMemory, action: PutBlocks, patience: TransferTimeout
) -> ev.PutDone | ev.PutFailed:
    """Puts blocks of the pool into the home store."""
    objects = [PutObject(key=item.key, parent=item.parent, checksum=item.checksum) for item in action.items]
    spots = memory.spots_of([item.block for item in action.items])
    deadline_s = patience.deadline_s(len(objects) * memory.layout.block_bytes)
    try:
        result = await client.put(action.store, objects, spots, deadline_s=deadline_s, hints=action.items[-1].hints)
    except MoonserveError as error:
        log.warning("put to %s failed: %s", action.store.instance_id, error)
        return ev.PutFailed(put_id=action.put_id, error=error)
    return ev.PutDone(put_id=action.put_id, num_refused=result.refused, corrupt=result.corrupt)


# Reads a prefix from store nodes into the own pool layer by layer, so that the engine can compute behind it meanwhile.
#
# First all parts are leased, which tells how many blocks are available. Then their bytes are read in *turns* of a few
# layers of all blocks each. Last, every block is verified by its writer's checksum, which covers all its layers. Its
# rules: a turn is announced once all its bytes are in the memory that the engine computes from. No turn is announced
# after a part has failed, but the parts before the failed one are still read to their end. When the load returns,
# nothing writes to the blocks any more. If the engine's device has its own memory, a turn is loaded there while the
# next is read.


class PrefixTimeout(Exception):
    """Raised in a step if a layer of its prefix did not arrive in time or will not arrive; the step is given up."""


class LayerGate:
    """The number of leading layers of one prefix that are in the pool. The event loop sets it and closes the gate; the
    engine's thread waits for it. The bytes are verified only at the end of the load."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_layers = 0
        self._is_closed = False

    @property
    def num_layers(self) -> int:
        return self._num_layers

    def announce(self, num_layers: int) -> None:
        """Announces that the first `num_layers` layers are in the pool."""
        with self._changed:
            self._num_layers = num_layers
            self._changed.notify_all()

    def close(self) -> None:
        """Announces that no further layer will arrive. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait(self, layer: int, timeout_s: float) -> None:
        """Blocks the thread until `layer` is in the pool. Raises PrefixTimeout after `timeout_s` or if the gate
        closes."""
        if self._num_layers > layer:  # the usual case needs no lock
            return
        with self._changed:
            self._changed.wait_for(lambda: self._num_layers > layer or self._is_closed, max(timeout_s, 0.0))
            if self._num_layers <= layer:
                raise PrefixTimeout(f"layer {layer} of a prefix did not arrive in time; {self._num_layers} layers did")


class BoundedWait:
    """Bounds one step's waits at a gate to `limit_s` in all. Used by the engine's thread, read after the step."""

    def __init__(self, gate: LayerGate, limit_s: float) -> None:
        self._gate = gate
        self._limit_s = limit_s
        self.waited_s = 0.0

    def before(self, layer: int) -> None:
        """Waits until the engine may read the prefix's `layer`. Raises PrefixTimeout."""
        if self._gate.num_layers > layer:
            return
        began_at = time.monotonic()
        try:
            self._gate.wait(layer, self._limit_s - self.waited_s)
        finally:
            self.waited_s += time.monotonic() - began_at


OnProgress = Callable[[ev.PrefixProgress], None]


@dataclass(slots=True, eq=False)
class _Part:
    """One store's share of the prefix, with the blocks that could be leased."""

    part: PrefixPart
    lease: ReadLease
    rows: Rows
    """Source and destination of piece 0 of each leased block."""
    num_good: int = 0
    seconds: float = 0.0

    @property
    def num_blocks(self) -> int:
        return len(self.rows)

    def as_read(self, block_bytes: int) -> ev.PartRead:
        return ev.PartRead(store=self.part.store, num_bytes=self.num_good * block_bytes, seconds=self.seconds)


@dataclass(frozen=True, slots=True)
class _Failure:
    """The first part that could not be read. The parts behind it are not used."""

    error: MoonserveError
    read: ev.PartRead


class LayeredLoad:
    """Execution of one LoadPrefix action. `on_progress` is called in the event loop for each turn that has arrived."""

    def __init__(
        self,
        client: BlockStores,
        memory: KvMemory,
        action: LoadPrefix,
        patience: TransferTimeout,
        gate: LayerGate,
        on_progress: OnProgress,
    ) -> None:
        self._client = client
        self._memory = memory
        self._action = action
        self._patience = replace(patience, base_s=min(patience.base_s, READ_STALL_S))
        self._gate = gate
        self._on_progress = on_progress
        self._parts: list[_Part] = []
        self._leases: list[ReadLease] = []
        self._failure: _Failure | None = None
        self._loading: asyncio.Task[None] | None = None  # the latest turn; it waits for the turns before it

    async def run(self) -> ev.PrefixLoaded | ev.PrefixLoadFailed:
        """Runs the whole load and returns its answer event."""
        text = "the prefix is read layer by layer: %s"
        log.debug(text, self._action.choice, extra=request_extra(self._action.request_id))
        try:
            await self._lease_all()
            await self._read_all()
            checksums = await self._verify()
            if self._loading is not None:
                await self._loading
        finally:
            if self._loading is not None:  # turns in flight end first, without raising their errors
                await asyncio.wait({self._loading})
            self._gate.close()
            for lease in self._leases:
                self._client.release_soon(lease)
        return self._answer(checksums)

    def _answer(self, checksums: list[int]) -> ev.PrefixLoaded | ev.PrefixLoadFailed:
        request_id, failure = self._action.request_id, self._failure
        reads = tuple(each.as_read(self._memory.layout.block_bytes) for each in self._parts)
        if failure is not None:
            reads += (failure.read,)
            if not checksums:
                return ev.PrefixLoadFailed(request_id=request_id, error=failure.error, reads=reads)
        return ev.PrefixLoaded(request_id=request_id, checksums=tuple(checksums), reads=reads)

    # -- leases

    async def _lease_all(self) -> None:
        for part in self._action.parts:
            began_at = time.monotonic()
            try:
                leased = await self._lease(part)
            except MoonserveError as error:
                self._fail(part, time.monotonic() - began_at, error)
                return
            leased.seconds = time.monotonic() - began_at
            self._parts.append(leased)
            if leased.num_blocks < len(part.keys):
                return

    async def _lease(self, part: PrefixPart) -> _Part:
        deadline_s = self._deadline_s(len(part.keys))
        lease = await self._client.lease(part.store, part.keys, ttl_s=ttl_for(deadline_s), timeout_s=deadline_s)
        if lease.objects:
            self._leases.append(lease)
        layout = self._memory.layout
        if any(stored.length != layout.block_bytes for stored in lease.objects):
            raise InvalidRequest(f"{part.store.instance_id} has blocks of another size")
        rows = np.empty((len(lease.objects), 3), np.int64)
        rows[:, REMOTE] = [stored.offset for stored in lease.objects]
        rows[:, LOCAL] = np.array(part.blocks[: len(rows)], np.int64) * layout.piece_bytes
        rows[:, LENGTH] = layout.piece_bytes
        return _Part(part, lease, rows)

    # -- reads

    async def _read_all(self) -> None:
        at_once = self._action.choice.layers_at_once
        assert at_once is not None, "this prefix is read layer by layer"
        num_layers = self._memory.layout.num_layers
        num_leased = sum(each.num_blocks for each in self._parts)
        began_at = time.monotonic()
        for first in range(0, num_layers, at_once):
            end = min(first + at_once, num_layers)
            for each in tuple(self._parts):
                if not await self._read_turn(each, range(2 * first, 2 * end)):
                    break
            if sum(each.num_blocks for each in self._parts) < num_leased or not num_leased:
                self._gate.close()
            progress = ev.PrefixProgress(
                request_id=self._action.request_id,
                num_blocks=num_leased,
                num_layers=end,
                layers_at_once=at_once,
                of_layers=num_layers,
                seconds=time.monotonic() - began_at,
            )
            turn = self._load_turn(range(first, end), progress, self._loading)
            self._loading = asyncio.create_task(turn)

    async def _read_turn(self, each: _Part, pieces: range) -> bool:
        """Reads the given pieces of a part. On failure gives up this part and those behind it, and returns False."""
        began_at = time.monotonic()
        try:
            await self._client.transfer(
                each.lease,
                self._transfer(each, pieces),
                deadline_s=self._deadline_s(each.num_blocks),
            )
        except MoonserveError as error:
            del self._parts[self._parts.index(each) :]
            self._fail(each.part, each.seconds + time.monotonic() - began_at, error)
            return False
        finally:
            each.seconds += time.monotonic() - began_at
        return True

    def _transfer(self, each: _Part, pieces: range) -> ScatterTransfer:
        """Returns the reads in block order, since a block's pieces are adjacent at the store."""
        strides = np.zeros(3, np.int64)
        strides[REMOTE], strides[LOCAL] = self._memory.layout.piece_bytes, self._memory.piece_stride
        shifts = np.array(pieces, np.int64)[None, :, None] * strides
        rows = (each.rows[:, None, :] + shifts).reshape(-1, 3)
        return ScatterTransfer(Op.READ, self._memory.segment, each.lease.segment, rows)

    async def _load_turn(self, layers: range, progress: ev.PrefixProgress, before: asyncio.Task[None] | None) -> None:
        """Loads a turn to the memory that the engine computes from, after the turn before it, and announces it."""
        blocks = [block for each in self._parts for block in each.part.blocks[: each.num_blocks]]
        if before is not None:
            await before
        await self._memory.staging.load(blocks, layers)
        if self._failure is None and blocks:
            self._gate.announce(progress.num_layers)
            self._on_progress(progress)

    # -- verification

    async def _verify(self) -> list[int]:
        """Verifies the blocks and returns the checksums of the leading ones that are correct."""
        checksums: list[int] = []
        for each in tuple(self._parts):
            began_at = time.monotonic()
            spots = self._memory.spots_of(each.part.blocks[: each.num_blocks])
            try:
                each.num_good = await self._client.verify(each.lease, spots)
            except MoonserveError as error:
                del self._parts[self._parts.index(each) :]
                self._fail(each.part, each.seconds + time.monotonic() - began_at, error)
                break
            each.seconds += time.monotonic() - began_at
            checksums += [stored.checksum for stored in each.lease.objects[: each.num_good]]
            if each.num_good < len(each.part.keys):
                del self._parts[self._parts.index(each) + 1 :]
                break
        return checksums

    def _fail(self, part: PrefixPart, seconds: float, error: MoonserveError) -> None:
        text = "prefix not read from %s: %s"
        log.warning(text, part.store.instance_id, error, extra=request_extra(self._action.request_id))
        num_bytes = len(part.keys) * self._memory.layout.block_bytes
        read = ev.PartRead(store=part.store, num_bytes=num_bytes, seconds=seconds, failed=True)
        self._failure = _Failure(error, read)

    def _deadline_s(self, num_blocks: int) -> float:
        return self._patience.deadline_s(num_blocks * self._memory.layout.block_bytes)
