"""The status pipe: what a process says of itself to whoever started it, one JSON object per line.

Owns the lines: `write` makes them, for `protocol.process`, and all who start processes read them here, blocking or not.
Whoever reads closes the descriptor that it was given. Knows nothing of how a process is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from typing import Any

from protocol.errors import MoonserveError

_READ_BYTES = 65536  # a pipe of Linux holds no more (pipe(7))


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


def reports(fd: int, timeout_s: float | None = None) -> Generator[Report, None, None]:
    """What a process says, until its end. Raises TimeoutError once `timeout_s` has passed."""
    give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
    rest = b""
    with os.fdopen(fd, "rb", buffering=0) as pipe:
        while True:
            left_s = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
            if not select.select([pipe], [], [], left_s)[0]:
                raise TimeoutError(f"no word within {timeout_s:g} s")
            read = pipe.read(_READ_BYTES)
            if not read:
                return
            *lines, rest = (rest + read).split(b"\n")
            yield from map(_report, lines)


async def follow(fd: int) -> AsyncGenerator[Report, None]:
    """What a process says, until its end, for an event loop. Who leaves early closes the iterator (`aclosing`)."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb")
    )
    try:
        async for line in reader:
            yield _report(line)
    finally:
        transport.close()


def ready_facts(fd: int, timeout_s: float | None = None) -> dict[str, str]:
    """Waits until a process serves. Raises NotReady, or TimeoutError once `timeout_s` has passed."""
    with contextlib.closing(reports(fd, timeout_s)) as said:
        for report in said:
            if (facts := _facts(report)) is not None:
                return facts
    raise _ended()


async def until_ready(fd: int) -> dict[str, str]:
    """As `ready_facts`, for an event loop."""
    async with contextlib.aclosing(follow(fd)) as said:
        async for report in said:
            if (facts := _facts(report)) is not None:
                return facts
    raise _ended()


def _facts(report: Report) -> dict[str, str] | None:
    if isinstance(report, Failed):
        raise NotReady(report.message)
    return report.facts if isinstance(report, Ready) else None


def _ended() -> NotReady:
    return NotReady("it ended before it was ready")


def _report(line: bytes) -> Report:
    entry: dict[str, Any] = json.loads(line)
    if "ready" in entry:
        return Ready(entry["ready"])
    if "failed" in entry:
        return Failed(entry["failed"])
    return Progress(entry["stage"], entry["fraction"])
