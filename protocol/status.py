"""The status pipe: what a process says of itself to whoever started it, one JSON object per line.

Owns the lines: `write` makes them, for `protocol.process`, and all who start processes read them here. Whoever
reads closes the descriptor that it was given. Knows nothing of how a process is started.
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
    """A process cannot start, in its own words, or ended without any."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What takes time now; `fraction` of it is done, where that is known."""

    stage: str
    fraction: float | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The process serves; `facts` are what its starter must know, such as its addresses."""

    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class Failed:
    """The process cannot start."""

    message: str


Report = Progress | Ready | Failed


def write(fd: int, report: Report) -> None:
    """Raises OSError where nobody reads any more."""
    match report:
        case Progress(stage, fraction):
            entry: dict[str, object] = {"stage": stage, "fraction": fraction}
        case Ready(facts):
            entry = {"ready": facts}
        case Failed(message):
            entry = {"failed": message}
    os.write(fd, json.dumps(entry).encode() + b"\n")


async def follow(fd: int) -> AsyncGenerator[Report, None]:
    """What a process says, until its end. Who leaves early closes the iterator (`aclosing`)."""
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
    """Waits until a process serves, and gives its facts. Raises NotReady."""
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
