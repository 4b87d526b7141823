"""I/O between a prefill worker's pool and store nodes: reads of prefixes, prefetches, puts of computed blocks.

The store client verifies the blocks that it reads. Blocks that did not arrive correctly count as missing.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from kvstore.client.blocks import BlockStores
from kvstore.client.objects import PutObject
from prefill_worker import events as ev
from prefill_worker.actions import LoadPrefix, PrefetchPrefix, PrefixPart, PutBlocks
from protocol.errors import MoonserveError
from protocol.logs import of
from protocol.pb import kvstore_pb2
from transfer.config import Patience
from worker.memory import KvMemory

log = logging.getLogger(__name__)

# If a store stalls for longer than this, computing the prefix is the better choice.
READ_STALL_S = 5.0


async def load_prefix(
    client: BlockStores, memory: KvMemory, action: LoadPrefix, patience: Patience
) -> ev.PrefixLoaded | ev.PrefixLoadFailed:
    """Reads the parts in order. The first missing or corrupt block ends the prefix."""
    request_id, block_bytes = action.request_id, memory.layout.block_bytes
    log.debug("the prefix is read: %s", action.choice, extra=of(request_id))
    checksums: list[int] = []
    reads: list[ev.PartRead] = []
    for part in action.parts:
        outcome = await _timed(client, memory, part, patience)
        reads.append(outcome.as_read(part, block_bytes))
        checksums += outcome.checksums
        if outcome.error is not None:
            store = part.store.instance_id
            text = "prefix not read from %s: %s"
            log.warning(text, store, outcome.error, extra=of(request_id))
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


async def _timed(client: BlockStores, memory: KvMemory, part: PrefixPart, patience: Patience) -> _PartOutcome:
    began_at = time.monotonic()
    try:
        good = await _load_part(client, memory, part, patience)
    except MoonserveError as error:
        return _PartOutcome([], time.monotonic() - began_at, error)
    return _PartOutcome(good, time.monotonic() - began_at)


async def _load_part(client: BlockStores, memory: KvMemory, part: PrefixPart, patience: Patience) -> list[int]:
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
        store, whose = part.store, of(action.request_id)
        try:
            request = kvstore_pb2.StorePrefetchRequest(keys=part.keys)
            reply = await client.ask(store, "Prefetch", request)
        except MoonserveError as error:
            log.info("no prefetch from %s: %s", store.instance_id, error, extra=whose)
            continue
        log.debug("%s fetches %d blocks", store.instance_id, reply.num_loading, extra=whose)


async def put_blocks(
    client: BlockStores, memory: KvMemory, action: PutBlocks, patience: Patience
) -> ev.PutDone | ev.PutFailed:
    """Puts blocks of the pool into the home store."""
    objects = [PutObject(key=item.key, parent=item.parent, checksum=item.checksum) for item in action.items]
    spots = memory.spots_of([item.block for item in action.items])
    deadline_s = patience.deadline_s(len(objects) * memory.layout.block_bytes)
    try:
        result = await client.put(action.store, objects, spots, deadline_s=deadline_s)
    except MoonserveError as error:
        log.warning("put to %s failed: %s", action.store.instance_id, error)
        return ev.PutFailed(put_id=action.put_id, error=error)
    return ev.PutDone(put_id=action.put_id, num_refused=result.refused, corrupt=result.corrupt)
