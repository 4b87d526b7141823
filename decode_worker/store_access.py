"""A decode worker's dealings with its home store: the blocks of preempted sequences out, and in again.

The store client verifies what it reads and never outlives its deadline. Whatever fails is an outcome like any other:
what is not there is computed again. Does not know sequences.
"""

from __future__ import annotations

import asyncio
import logging

from decode_worker.actions import KeepBlocks, LoadBlocks
from decode_worker.events import BlocksLoaded, Kept
from decode_worker.verify import BlockVerifier
from engine.staging import InPlace, Staging
from kvstore.block_client import BlockClient, right_s
from kvstore.objects import Pieces, PutObject
from protocol.errors import MoonserveError
from protocol.ids import BlockId
from protocol.layout import KvLayout
from transfer import Segment
from transfer.patience import Patience

log = logging.getLogger(__name__)

# Others wait for these blocks, or their sequence for its next token: computing again is soon the better way.
PATIENCE = Patience(base_s=2.0)
# Below this, checksums take less time than handing them to a thread.
INLINE_BYTES = 1 << 20


class StoreAccess:
    """To and from one pool."""

    def __init__(
        self,
        client: BlockClient,
        segment: Segment,
        layout: KvLayout,
        num_blocks: int,
        verifier: BlockVerifier,
        staging: Staging | None = None,
    ) -> None:
        """`staging`: None where steps compute from the segment."""
        self._client = client
        self._segment = segment
        self._layout = layout
        self._num_blocks = num_blocks
        self._verifier = verifier
        self._staging = staging or InPlace()

    async def keep(self, action: KeepBlocks) -> Kept:
        """Raises nothing: a store that did not take them is an outcome."""
        await self._staging.store([item.block for item in action.blocks])
        checksums = await self._checksums(action)
        objects = [
            PutObject(
                key=item.key, parent=item.parent, checksum=value, pieces=self._pieces(item.block)
            )
            for item, value in zip(action.blocks, checksums, strict=True)
        ]
        deadline_s = PATIENCE.deadline_s(len(objects) * self._layout.block_bytes)
        began_at = _now()
        try:
            result = await self._client.put(
                action.store, objects, self._segment, deadline_s=deadline_s
            )
        except MoonserveError as error:
            log.warning("preempted blocks not kept by %s: %s", action.store.instance_id, error)
            return Kept(
                move_id=action.move_id,
                checksums=checksums,
                is_complete=False,
                num_bytes=len(objects) * self._layout.block_bytes,
                seconds=_now() - began_at,
                error=error,
            )
        return Kept(
            move_id=action.move_id,
            checksums=checksums,
            is_complete=not (result.refused or result.corrupt),
            corrupt=result.corrupt,
            num_bytes=result.stored * self._layout.block_bytes,
            seconds=_now() - began_at,
        )

    async def load(self, action: LoadBlocks) -> BlocksLoaded:
        """Raises nothing: what is not there, or not good, is not given."""
        num_bytes = len(action.keys) * self._layout.block_bytes
        began_at = _now()
        checksums: tuple[int, ...] = ()
        try:
            checksums = await self._read(action, PATIENCE.deadline_s(num_bytes))
            num_bytes = len(checksums) * self._layout.block_bytes
        except MoonserveError as error:
            log.warning("kept blocks not read from %s: %s", action.store.instance_id, error)
        return BlocksLoaded(
            move_id=action.move_id,
            checksums=checksums,
            num_bytes=num_bytes,
            seconds=_now() - began_at,
        )

    async def _read(self, action: LoadBlocks, deadline_s: float) -> tuple[int, ...]:
        """Checksums of the leading blocks that are good."""
        client = self._client
        lease = await client.lease(
            action.store, action.keys, ttl_s=right_s(deadline_s), timeout_s=deadline_s
        )
        if not lease.objects:
            return ()
        try:
            places = [self._pieces(block) for block in action.blocks[: len(lease.objects)]]
            num_good = await client.read(lease, self._segment, places, deadline_s=deadline_s)
            await self._staging.load(action.blocks[:num_good])
        finally:
            client.release_soon(lease)
        return tuple(stored.checksum for stored in lease.objects[:num_good])

    async def _checksums(self, action: KeepBlocks) -> tuple[int, ...]:
        unknown = sum(item.checksum is None for item in action.blocks)
        if unknown * self._layout.block_bytes > INLINE_BYTES:
            return await asyncio.to_thread(self._make_checksums, action)
        return self._make_checksums(action)

    def _make_checksums(self, action: KeepBlocks) -> tuple[int, ...]:
        size = self._layout.block_size
        return tuple(
            self._verifier.checksum(item.block, size) if item.checksum is None else item.checksum
            for item in action.blocks
        )

    def _pieces(self, block: BlockId) -> Pieces:
        """(offset, length) of all pieces of a block, in the order of a stored object."""
        layout = self._layout
        return tuple(
            (layout.pool_offset(self._num_blocks, piece, block), layout.piece_bytes)
            for piece in range(layout.pieces_per_block)
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
