"""Processes that a process starts to share its work: told apart from those that a launcher supervises, they never start
again.

Owns how one of them ends and how all of them are watched. Knows nothing of what they do, nor how they are started.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process
from collections.abc import Iterable


async def until_one_has_ended(processes: Iterable[Process]) -> None:
    """Whatever ends it."""
    ends = [asyncio.ensure_future(each.wait()) for each in processes]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for end in ends:
            end.cancel()


def terminate(process: Process) -> None:
    """SIGTERM; no-op for one that has ended."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()


async def ended(process: Process, patience_s: float) -> None:
    """Returns once it has ended; it is killed when it does not do so in time."""
    try:
        async with asyncio.timeout(patience_s):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
