"""Status pipe: reports of a process to its starter, one JSON object per line.

The module owns the format: `protocol.process` writes reports, and all starters of processes read them here. A reader
closes the descriptor that it is given. The module does not know how a process is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from protocol.errors import MoonserveError


class NotReady(MoonserveError):
    """A process cannot start, with the reason that it reports, or ended before it was ready."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Current stage of the start; `fraction` of it is done, if that is known."""

    stage: str
    fraction: float | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The process serves; `facts` are what the starter must know, such as addresses."""

    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class Failed:
    """The process cannot start."""

    message: str


Report = Progress | Ready | Failed


def write(fd: int, report: Report) -> None:
    """Writes a report. Raises OSError if the pipe has no reader any more."""
    match report:
        case Progress(stage, fraction):
            entry: dict[str, object] = {"stage": stage, "fraction": fraction}
        case Ready(facts):
            entry = {"ready": facts}
        case Failed(message):
            entry = {"failed": message}
    os.write(fd, json.dumps(entry).encode() + b"\n")


async def follow(fd: int) -> AsyncGenerator[Report, None]:
    """Yields the reports of a process until its end. A caller that stops early must close the iterator (`aclosing`)."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb")
    )
    try:
        async for line in reader:
            yield _report(line)
    finally:
        transport.close()


async def until_ready(fd: int) -> dict[str, str]:
    """Waits until a process serves and returns its facts. Raises NotReady if it cannot start or ends."""
    async with contextlib.aclosing(follow(fd)) as said:
        async for report in said:
            if isinstance(report, Failed):
                raise NotReady(report.message)
            if isinstance(report, Ready):
                return report.facts
    raise NotReady("it ended before it was ready")


def _report(line: bytes) -> Report:
    entry: dict[str, Any] = json.loads(line)
    if "ready" in entry:
        return Ready(entry["ready"])
    if "failed" in entry:
        return Failed(entry["failed"])
    return Progress(entry["stage"], entry["fraction"])
