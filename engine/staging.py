"""KV between the memory that the transfer engine reaches, and the memory that an engine computes from.

On a CPU they are one: `InPlace`. On a GPU they are two of the same layout; a block has the same number in both. What
arrives is loaded before anything computes from it, what leaves is stored before anybody reads it. **A block that can be
found is equal in both**, so that who finds it may compute from it or send it. Rule: whoever asks holds the blocks until
the copy is done. Does not know whose blocks they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from protocol.ids import BlockId

if TYPE_CHECKING:
    from engine.cuda.staging import HostStaging
    from engine.engine import Engine


T = TypeVar("T")


async def uninterrupted(executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """What `work` gives. A caller that is cancelled waits for its end all the same, and is cancelled then."""
    task = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # retrieved: the cancelled caller is not interested
        raise


class Staging(Protocol):
    """Copies of whole blocks; nothing to do for no blocks. A caller that is cancelled waits for its copy's end."""

    async def load(self, blocks: Sequence[BlockId], layers: range | None = None) -> None:
        """On return these blocks' `layers` (None = all) are where the engine computes from, as they were in the
        transfer engine's memory."""

    async def store(self, blocks: Sequence[BlockId]) -> None:
        """On return these blocks are in the transfer engine's memory, as steps that were begun before leave them."""

    def close(self) -> None:
        """Waits for what is under way."""


class InPlace:
    """`Staging` of an engine that computes from the transfer engine's own memory."""

    async def load(self, blocks: Sequence[BlockId], layers: range | None = None) -> None:
        pass

    async def store(self, blocks: Sequence[BlockId]) -> None:
        pass

    def close(self) -> None:
        pass


class StagingThread:
    """`Staging` through a ring of its own, in a thread of its own: steps go on meanwhile. Copies are done one after
    the other in the order of the calls, each layer by layer."""

    def __init__(self, ring: HostStaging) -> None:
        self._ring = ring
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")

    async def load(self, blocks: Sequence[BlockId], layers: range | None = None) -> None:
        if blocks:
            load = partial(self._ring.load_all, tuple(blocks), layers)
            await uninterrupted(self._executor, load)

    async def store(self, blocks: Sequence[BlockId]) -> None:
        if blocks:
            await uninterrupted(self._executor, partial(self._ring.store_all, tuple(blocks)))

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


def staging_of(engine: Engine) -> Staging:
    """What the engine's pool needs."""
    return StagingThread(engine.make_staging()) if engine.is_staged else InPlace()
