"""I/O between a decode worker's pool and its home store: puts of preempted sequences and answers, reads of the former.

The store client verifies the blocks that it reads and never outlives its deadline. A failure is an ordinary outcome:
missing blocks are computed again. Does not know sequences.
"""

import logging
import time

from moonserve.decode_worker.block_verifier import BlockVerifier
from moonserve.decode_worker.decisions.events import BlocksLoaded, BlocksStored, LoadBlocks, StoreBlocks
from moonserve.kvstore.client.blocks import BlockStores
from moonserve.kvstore.client.node_access.objects import PutObject, PutResult
from moonserve.protocol.errors import MoonserveError
from moonserve.transfer.config import TransferTimeout
from moonserve.worker.process import KvMemory

log = logging.getLogger(__name__)

# Other requests wait for these blocks, or a sequence waits for its next token: computing again soon becomes cheaper.
STORE_TIMEOUTS = TransferTimeout(base_s=2.0)


class OffloadStore:
    """Puts and reads blocks of one pool."""

    def __init__(self, client: BlockStores, memory: KvMemory, verifier: BlockVerifier) -> None:
        self._client = client
        self._memory = memory
        self._verifier = verifier

    async def store(self, action: StoreBlocks) -> BlocksStored:
        """Puts the blocks into the store. A MoonserveError of the store becomes the event's `error`."""
        await self._memory.staging.store([item.block for item in action.blocks])
        checksums = await self._checksums(action)
        objects = [
            PutObject(key=item.key, parent=item.parent, checksum=value)
            for item, value in zip(action.blocks, checksums, strict=True)
        ]
        spots = self._memory.spots_of([item.block for item in action.blocks])
        deadline_s = STORE_TIMEOUTS.deadline_s(spots.nbytes)
        began_at = time.monotonic()
        result: PutResult | None = None
        failure: MoonserveError | None = None
        try:
            result = await self._client.put(action.store, objects, spots, deadline_s=deadline_s, hints=action.hints)
        except MoonserveError as error:
            log.warning("KV blocks not stored at %s: %s", action.store.instance_id, error)
            failure = error
        return BlocksStored(
            move_id=action.move_id,
            checksums=checksums,
            is_complete=result is not None and not (result.refused or result.corrupt),
            corrupt=() if result is None else result.corrupt,
            num_bytes=(len(objects) if result is None else result.stored) * self._memory.layout.block_bytes,
            seconds=time.monotonic() - began_at,
            error=failure,
        )

    async def load(self, action: LoadBlocks) -> BlocksLoaded:
        """Reads blocks from the store. The event has no checksums for missing or corrupt blocks, or after a
        MoonserveError of the store."""
        num_bytes = len(action.keys) * self._memory.layout.block_bytes
        began_at = time.monotonic()
        checksums: tuple[int, ...] = ()
        try:
            checksums = await self._read(action, STORE_TIMEOUTS.deadline_s(num_bytes))
            num_bytes = len(checksums) * self._memory.layout.block_bytes
        except MoonserveError as error:
            log.warning("offloaded blocks not read from %s: %s", action.store.instance_id, error)
        return BlocksLoaded(
            move_id=action.move_id,
            checksums=checksums,
            num_bytes=num_bytes,
            seconds=time.monotonic() - began_at,
        )

    async def _read(self, action: LoadBlocks, deadline_s: float) -> tuple[int, ...]:
        """Reads the blocks and returns the checksums of the leading ones that are correct."""
        spots = self._memory.spots_of(action.blocks)
        checksums = await self._client.read(action.store, action.keys, spots, deadline_s=deadline_s)
        await self._memory.staging.load(action.blocks[: len(checksums)])
        return tuple(checksums)

    async def _checksums(self, action: StoreBlocks) -> tuple[int, ...]:
        unknown = [item.block for item in action.blocks if item.checksum is None]
        made = iter(await self._verifier.checksums(unknown))
        return tuple(next(made) if item.checksum is None else item.checksum for item in action.blocks)
