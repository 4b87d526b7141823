"""Child processes as their starter sees them: starting them, their reports on the status pipe, ending them.

A report is one JSON object per line; `protocol.process.lifecycle` writes them. No process is restarted here.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.process.event_loop import cancel_all

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


async def spawn(
    argv: Sequence[str],
    environment: Mapping[str, str],
    pass_fds: Sequence[int] = (),
    *,
    python: str | None = None,
    log_fd: int | None = None,
) -> tuple[Process, int]:
    """Starts a process that reports to this one and ends with it. Returns it and the descriptor of its reports.

    `argv`: arguments of the interpreter `python`, by default this process's. With `log_fd`, the process writes there,
    reads nothing, and has a session of its own, so a terminal's Ctrl-C does not reach it."""
    read_fd, write_fd = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            python or sys.executable,
            *argv,
            "--status-fd",
            str(write_fd),
            "--parent-pid",
            str(os.getpid()),
            stdin=None if log_fd is None else asyncio.subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            pass_fds=(write_fd, *pass_fds),
            env=environment,
            start_new_session=log_fd is not None,
        )
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    return process, read_fd


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """A process that computes a part of this worker."""

    process: Process
    ready: asyncio.Task[dict[str, str]]
    """Waits until the process serves. Its result is the process's facts, or NotReady."""

    @classmethod
    async def start(
        cls, command: str, flags: Iterable[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> "WorkerPart":
        """Starts `moonserve <command>` with these flags, beside `--status-fd` and `--parent-pid`."""
        process, read_fd = await spawn(("-m", "moonserve", command, *flags), environment, pass_fds)
        return cls(process, asyncio.create_task(wait_until_ready(read_fd)))

    async def stop(self, timeout_s: float) -> None:
        """Ends the process, and kills it after `timeout_s`."""
        await cancel_all([self.ready])
        terminate(self.process)
        await wait_or_kill(self.process, timeout_s)


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
