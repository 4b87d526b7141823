"""Parts of a cluster in the test's own process: started, found by their ready report, and stopped in order."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from moonserve.protocol.process.lifecycle import Lifecycle
from tests.patience import PATIENCE_S

C = TypeVar("C")


class ReportedLifecycle(Lifecycle):
    """Lifecycle that reports to the test its stages, and when and where a part is ready."""

    def __init__(self) -> None:
        super().__init__(None)
        self.facts: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self.stages: list[str] = []

    def progress(self, stage: str, fraction: float | None = None) -> None:
        self.stages.append(stage)

    def ready(self, **facts: str) -> None:
        self.facts.set_result(facts)


@asynccontextmanager
async def serving(
    serve: Callable[[C, Lifecycle], Awaitable[None]], config: C, timeout_s: float = PATIENCE_S
) -> AsyncIterator[dict[str, str]]:
    """Runs a process's `serve` until the block ends. Yields its facts, such as its RPC address."""
    lifecycle = ReportedLifecycle()
    running = asyncio.ensure_future(serve(config, lifecycle))
    async with asyncio.timeout(timeout_s):
        await asyncio.wait({running, lifecycle.facts}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()  # raises the reason why it could not start
    try:
        yield lifecycle.facts.result()
    finally:
        lifecycle.stopping.set()
        async with asyncio.timeout(timeout_s):
            await running
