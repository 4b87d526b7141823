"""Child processes as their starter sees them: their reports on the status pipe, waiting for them, ending them.

A report is one JSON object per line; `protocol.process.lifecycle` writes them. How a process is started is not known
here, and none is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Any

from moonserve.protocol.errors import MoonserveError

log = logging.getLogger(__name__)


class NotReady(MoonserveError):
    """A process cannot start, with the reason that it reports, or ended before it was ready."""


@dataclass(frozen=True, slots=True)
class StartProgress:
    """Current stage of the start; `fraction` of it is done, if that is known."""

    stage: str
    fraction: float | None = None


@dataclass(frozen=True, slots=True)
class StartReady:
    """The process serves; `facts` are what the starter must know, such as addresses."""

    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The process cannot start."""

    message: str


StartReport = StartProgress | StartReady | StartFailed


def write_report(fd: int, report: StartReport) -> None:
    """Writes a report. Raises OSError if the pipe has no reader any more."""
    match report:
        case StartProgress(stage, fraction):
            entry: dict[str, object] = {"stage": stage, "fraction": fraction}
        case StartReady(facts):
            entry = {"ready": facts}
        case StartFailed(message):
            entry = {"failed": message}
    os.write(fd, json.dumps(entry).encode() + b"\n")


async def read_reports(fd: int) -> AsyncGenerator[StartReport, None]:
    """Yields the reports of a process until its end, and closes `fd`.

    A caller that stops early must close the iterator (`aclosing`)."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb")
    )
    try:
        async for line in reader:
            yield _report(line)
    finally:
        transport.close()


async def wait_until_ready(fd: int) -> dict[str, str]:
    """Waits until a process serves and returns its facts. Raises NotReady if it cannot start or ends."""
    async with contextlib.aclosing(read_reports(fd)) as reports:
        async for report in reports:
            if isinstance(report, StartFailed):
                raise NotReady(report.message)
            if isinstance(report, StartReady):
                return report.facts
    raise NotReady("the process ended before it was ready")


def _report(line: bytes) -> StartReport:
    entry: dict[str, Any] = json.loads(line)
    if "ready" in entry:
        return StartReady(entry["ready"])
    return StartFailed(entry["failed"]) if "failed" in entry else StartProgress(entry["stage"], entry["fraction"])


async def wait_for_first_exit(processes: Iterable[Process]) -> None:
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


async def wait_or_kill(process: Process, timeout_s: float) -> None:
    """Waits until the process has ended and kills it after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        log.warning("pid %d did not stop in %g s: killing it", process.pid, timeout_s)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
