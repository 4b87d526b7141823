"""The worker's dealings with store nodes: prefixes in, computed blocks out.

The store client verifies what it reads; what did not arrive well counts as not there.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

from kvstore.block_client import BlockClient, right_s
from kvstore.objects import PutObject
from prefill_worker import events as ev
from prefill_worker.actions import LoadPrefix, PrefetchPrefix, PrefixPart, PutBlocks
from prefill_worker.landing import KvMemory
from protocol.errors import MoonserveError
from protocol.logs import of
from transfer.patience import Patience

log = logging.getLogger(__name__)

# A store that stalls for longer is not worth waiting for: the prefix can be computed.
READ_STALL_S = 5.0


async def load_prefix(
    client: BlockClient, memory: KvMemory, action: LoadPrefix, patience: Patience
) -> ev.PrefixLoaded | ev.PrefixLoadFailed:
    """Reads the parts in order; the first block that is missing or bad ends the prefix."""
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
                return ev.PrefixLoadFailed(
                    request_id=request_id, error=outcome.error, reads=tuple(reads)
                )
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


async def _timed(
    client: BlockClient, memory: KvMemory, part: PrefixPart, patience: Patience
) -> _PartOutcome:
    clock = asyncio.get_running_loop().time
    began_at = clock()
    try:
        good = await _load_part(client, memory, part, patience)
    except MoonserveError as error:
        return _PartOutcome([], clock() - began_at, error)
    return _PartOutcome(good, clock() - began_at)


async def _load_part(
    client: BlockClient, memory: KvMemory, part: PrefixPart, patience: Patience
) -> list[int]:
    """Checksums of the leading blocks that are good."""
    patience = replace(patience, base_s=min(patience.base_s, READ_STALL_S))
    deadline_s = patience.deadline_s(len(part.keys) * memory.layout.block_bytes)
    # Granting the lease may mean reading everything from a disk.
    lease = await client.lease(
        part.store, part.keys, ttl_s=right_s(deadline_s), timeout_s=deadline_s
    )
    if not lease.objects:
        return []
    try:
        places = [memory.pieces_of(block) for block in part.blocks[: len(lease.objects)]]
        num_good = await client.read(lease, memory.segment, places, deadline_s=deadline_s)
        await memory.staging.load(part.blocks[:num_good])
    finally:
        client.release_soon(lease)
    return [stored.checksum for stored in lease.objects[:num_good]]


async def prefetch(client: BlockClient, action: PrefetchPrefix) -> None:
    """Asks the stores of a waiting request for what they have on disk. Whatever fails is read later, or computed."""
    for part in action.parts:
        store, whose = part.store, of(action.request_id)
        try:
            num_loading = await client.prefetch(store, part.keys)
        except MoonserveError as error:
            log.info("no prefetch from %s: %s", store.instance_id, error, extra=whose)
            continue
        log.debug("%s fetches %d blocks", store.instance_id, num_loading, extra=whose)


async def put_blocks(
    client: BlockClient, memory: KvMemory, action: PutBlocks, patience: Patience
) -> ev.PutDone | ev.PutFailed:
    """Writes blocks from the pool into the home store."""
    objects = [
        PutObject(
            key=item.key,
            parent=item.parent,
            checksum=item.checksum,
            pieces=memory.pieces_of(item.block),
        )
        for item in action.items
    ]
    deadline_s = patience.deadline_s(len(objects) * memory.layout.block_bytes)
    try:
        result = await client.put(action.store, objects, memory.segment, deadline_s=deadline_s)
    except MoonserveError as error:
        log.warning("put to %s failed: %s", action.store.instance_id, error)
        return ev.PutFailed(put_id=action.put_id, error=error)
    return ev.PutDone(put_id=action.put_id, num_refused=result.refused, corrupt=result.corrupt)
