"""Ends and watches the child processes that a process starts to share its work.

Unlike the processes that a launcher supervises, they are never restarted. This module does not know what they do or how
they are started.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process
from collections.abc import Iterable


async def until_one_has_ended(processes: Iterable[Process]) -> None:
    """Waits until one of the processes has ended, for whatever reason."""
    ends = [asyncio.ensure_future(each.wait()) for each in processes]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for end in ends:
            end.cancel()


def terminate(process: Process) -> None:
    """Sends SIGTERM; no-op if the process has ended."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()


async def ended(process: Process, patience_s: float) -> None:
    """Waits until the process has ended and kills it after `patience_s`."""
    try:
        async with asyncio.timeout(patience_s):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
