"""Copies KV blocks between the transfer engine's memory and the memory that an engine computes from.

On a CPU both are the same memory: `InPlace`. On a GPU they are two pools of the same layout, and a block has the same
id in both. Received blocks are loaded before a step computes from them; blocks to be sent are stored before they are
read. **A findable block is equal in both**, so it can be computed from or sent. Rule: the caller holds the blocks until
the copy is done. Does not know the owners of blocks.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from moonserve.protocol.request import BlockId

if TYPE_CHECKING:
    from moonserve.engine.cuda.block_copier import BlockCopier


T = TypeVar("T")


async def run_uninterrupted(executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Runs `work` in `executor` and returns its result. A cancelled caller still waits for the end of `work`, and is
    cancelled then."""
    task = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # marked as retrieved, since the cancelled caller does not handle it
        raise


class Staging(Protocol):
    """Copies whole blocks; does nothing for no blocks. A cancelled caller still waits for the end of its copy."""

    async def load(self, blocks: Sequence[BlockId], layers: range | None = None) -> None:
        """Copies `layers` (None = all) of the blocks from the transfer engine's memory to the engine's."""

    async def store(self, blocks: Sequence[BlockId]) -> None:
        """Copies the blocks to the transfer engine's memory, as steps that were begun before leave them."""

    def close(self) -> None:
        """Waits for copies in flight."""


class InPlace:
    """`Staging` of an engine that computes from the transfer engine's own memory."""

    async def load(self, blocks: Sequence[BlockId], layers: range | None = None) -> None:
        pass

    async def store(self, blocks: Sequence[BlockId]) -> None:
        pass

    def close(self) -> None:
        pass


class StagingThread:
    """`Staging` through its own copier in its own thread, so that steps continue meanwhile. Copies run one after
    another in the order of the calls, each layer by layer."""

    def __init__(self, copier: "BlockCopier") -> None:
        self._copier = copier
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")

    async def load(self, blocks: Sequence[BlockId], layers: range | None = None) -> None:
        if blocks:
            load = partial(self._copier.load_all, tuple(blocks), layers)
            await run_uninterrupted(self._executor, load)

    async def store(self, blocks: Sequence[BlockId]) -> None:
        if blocks:
            await run_uninterrupted(self._executor, partial(self._copier.store_all, tuple(blocks)))

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
