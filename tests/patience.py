"""How long tests wait.

Owns two numbers, and the waits for what can only be asked for. The numbers' rule: a wait for what is certain to come
ends by its coming, and whoever waits `PATIENCE_S` for it has found a hang, not a busy machine; what must not be ended
by its deadline gets one of `NEVER_S`. No test says that something took less than a time: what ends too late is made to
never end, and what a deadline ends is left with nothing else that could end it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 90.0
"""Of a machine whose processors are everybody else's."""

NEVER_S = 3_600.0
"""Longer than pytest lets any test run (pyproject.toml)."""


def until(holds: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Returns once it holds, which another process or thread is working on; fails after `timeout_s`."""
    give_up_at = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_at, "it did not come to that in time"
        time.sleep(0.005)


async def answered(ask: Callable[[], Awaitable[T | None]], timeout_s: float = PATIENCE_S) -> T:
    """The first answer that is true, or not empty, of another process, which can only be asked; raises TimeoutError
    after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not (answer := await ask()):  # noqa: ASYNC110 - it is elsewhere
            await asyncio.sleep(0.01)
    return answer


async def came_true(holds: Callable[[], object]) -> None:
    """Returns once it holds, which other tasks are working on."""

    async def ask() -> object:
        return holds()

    await answered(ask)
