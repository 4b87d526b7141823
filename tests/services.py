"""Parts of a cluster in the test's own process: started, found by their ready report, ended in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from protocol.process import Lifecycle
from tests.patience import PATIENCE_S

C = TypeVar("C")


class ReportedLifecycle(Lifecycle):
    """Tells the test when a part is ready, and where."""

    def __init__(self) -> None:
        super().__init__(None)
        self.facts: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()

    def ready(self, **facts: str) -> None:
        self.facts.set_result(facts)


@asynccontextmanager
async def serving(
    serve: Callable[[C, Lifecycle], Awaitable[None]], config: C, timeout_s: float = PATIENCE_S
) -> AsyncIterator[dict[str, str]]:
    """What `serve` of some process runs, until the block ends; gives its facts, such as its RPC address."""
    lifecycle = ReportedLifecycle()
    running = asyncio.ensure_future(serve(config, lifecycle))
    async with asyncio.timeout(timeout_s):
        await asyncio.wait({running, lifecycle.facts}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()  # why it could not start
    try:
        yield lifecycle.facts.result()
    finally:
        lifecycle.stopping.set()
        async with asyncio.timeout(timeout_s):
            await running
