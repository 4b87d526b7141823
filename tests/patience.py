"""Timeouts of tests, and waits for conditions that can only be polled.

Rules for the two numbers: a wait for something certain ends when it arrives, so a test that waits `PATIENCE_S` has
found a hang, not a busy machine. Something that must not be ended by its deadline gets a deadline of `NEVER_S`. No test
asserts that something took less than some time: a thing that would end too late is made to never end, and a thing that
a deadline must end has nothing else that could end it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from moonserve.protocol.rpc.grpc_transport import Channels

T = TypeVar("T")

PATIENCE_S = 90.0
"""Allows for a machine whose processors are shared with other work."""

NEVER_S = 3_600.0
"""Longer than pytest lets any test run (pyproject.toml)."""


def until(holds: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Waits until `holds` is true, by the work of another process or thread. Fails after `timeout_s`."""
    give_up_at = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_at, "it did not come to that in time"
        time.sleep(0.005)


async def answered(
    ask: Callable[[], Awaitable[T]], holds: Callable[[T], object] = bool, timeout_s: float = PATIENCE_S
) -> T:
    """Returns the first answer for which `holds` is true, by polling another process: by default the first that is true
    or not empty. Raises TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not holds(answer := await ask()):  # noqa: ASYNC110 - the state is elsewhere
            await asyncio.sleep(0.01)
    return answer


async def came_true(holds: Callable[[], object]) -> None:
    """Waits until `holds` is true, by the work of other tasks."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - any state
            await asyncio.sleep(0.01)


async def begin_and_cancel(work: Coroutine[Any, Any, object]) -> None:
    """Cancels `work` after its first steps, up to where it waits, and awaits its end."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


class PatientChannels(Channels):
    """Channels whose calls wait long for a reply; a peer that is gone is still noticed at once."""

    async def call(self, method: Callable[..., Awaitable[T]], request: Any, **options: Any) -> T:
        return await super().call(method, request, **{**options, "timeout_s": PATIENCE_S})
