"""Starts processes, follows their progress, restarts what dies, stops everything.

Rules: a process that dies before it was ready ends the whole start, with its last log lines; one that dies later is
started again with the same options, at once, and then less and less eagerly; one that is to be restarted gives way in
order, and goes on where its successor does not come up; whatever happens, `stop` leaves no process behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from deploy.plan import ProcessSpec
from protocol import status
from protocol.config import EXIT_CONFIG
from protocol.errors import ConfigError, MoonserveError

log = logging.getLogger(__name__)

LAST_LINES = 15
FIRST_RESTART_DELAY_S = 0.5  # of one that dies soon again; the first time there is none
LAST_RESTART_DELAY_S = 30.0
_STDERR = 2
STEADY_AFTER_S = 60.0  # one that lived this long is started again at once


class ChildDied(MoonserveError):
    """A process ended before it was ready. `exit_code` is for the launcher's own exit."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True, eq=False)
class Child:
    """One process and what it last said of itself."""

    spec: ProcessSpec
    log_path: Path
    process: asyncio.subprocess.Process | None = None
    stage: str = "starting"
    fraction: float | None = None
    facts: dict[str, str] = field(default_factory=dict)  # from its ready report
    failure: str | None = None  # why it could not start, in its own words
    restarts: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    follower: asyncio.Task[None] | None = None  # reads its status pipe
    watcher: asyncio.Task[None] | None = None  # starts it again when it dies; once it was ready

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None


async def _at_once() -> None:
    """Nobody has to be asked."""


class Supervisor:
    """The processes of one launcher."""

    def __init__(
        self,
        log_dir: Path,
        environment: Mapping[str, str],
        on_change: Callable[[], None],
        may_restart: Callable[[], Awaitable[None]] = _at_once,
    ) -> None:
        """`may_restart`: returns when a process that died may be started again, for launchers that others may have
        taken over from."""
        self.children: list[Child] = []
        self._log_dir = log_dir
        self._environment = environment
        self._on_change = on_change
        self._may_restart = may_restart
        # By the wait for its end; they have successors.
        self._leaving: dict[asyncio.Task[int], Child] = {}
        self._stopping = False

    async def start(self, specs: list[ProcessSpec]) -> list[Child]:
        """Starts processes side by side and returns when all are ready. Raises ChildDied or ConfigError."""
        children = [Child(spec, self._log_dir / f"{spec.instance_id}.log") for spec in specs]
        self.children += children
        for child in children:
            await self._begin(child)
        waits = [asyncio.create_task(self._until_ready(child)) for child in children]
        try:
            await asyncio.gather(*waits)
        finally:
            await _cancel(waits)
        for child in children:
            child.watcher = self._watch(child)
        return children

    async def stop(self) -> None:
        """Ends every process: SIGTERM, and SIGKILL for those that take longer than their grace."""
        self._stopping = True
        await _cancel([child.watcher for child in self.children if child.watcher])
        children = [*self.children, *self._leaving.values()]
        await asyncio.gather(*(_end(child) for child in children))
        await _cancel([child.follower for child in children if child.follower])

    async def restart(self, child: Child) -> None:
        """Replaces a process that is ready, and returns when its successor is. One that overlaps ends when it has done
        what it had begun, however long that takes. Raises ChildDied or ConfigError where the successor does not come
        up; one that overlaps serves on then, another one is started again and again."""
        assert child.watcher is not None, "it was ready"
        await _cancel([child.watcher])
        try:
            if child.spec.overlaps:
                await self._succeed(child)
            else:
                child.stage = "stopping"
                self._on_change()
                await _end(child)
                await self._renew(child)
        finally:
            child.watcher = self._watch(child)

    async def _succeed(self, child: Child) -> None:
        old = replace(child)
        try:
            await self._renew(child)
        except BaseException:  # cancelled too: the one that still serves counts again
            if child.process is not old.process:
                await asyncio.shield(_end(child))
            child.process, child.follower = old.process, old.follower
            child.stage, child.facts = old.stage, old.facts
            raise
        assert old.process is not None
        _signal(old.process, signal.SIGUSR1)
        leaving = asyncio.create_task(old.process.wait())
        self._leaving[leaving] = old
        leaving.add_done_callback(self._leaving.pop)

    async def _renew(self, child: Child) -> None:
        """Starts its next process and waits until that is ready."""
        child.ready, child.failure = asyncio.Event(), None
        child.stage, child.fraction = "restarting", None
        self._on_change()
        await self._begin(child)
        await self._until_ready(child)
        child.restarts += 1

    async def _begin(self, child: Child) -> None:
        """Raises ChildDied where there is not even a process."""
        try:
            await self._spawn(child)
        except OSError as error:
            text = f"{child.spec.instance_id} could not be started: {error}"
            raise ChildDied(text, exit_code=1) from error

    async def _spawn(self, child: Child) -> None:
        read_fd, write_fd = os.pipe()
        child.failure = None
        try:
            with _log_of(child) as log_file:
                child.process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    child.spec.module,
                    *child.spec.flags,
                    "--status-fd",
                    str(write_fd),
                    "--parent-pid",
                    str(os.getpid()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=log_file,
                    pass_fds=(write_fd, *child.spec.fds),
                    env={**self._environment, **child.spec.environment},
                    start_new_session=True,  # a terminal's Ctrl-C is for the launcher alone
                )
        except BaseException:  # whatever it was, nobody else could close it
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        child.follower = asyncio.create_task(self._note_all(child, read_fd))

    async def _note_all(self, child: Child, read_fd: int) -> None:
        """Takes in what the process says on its status pipe, until it ends."""
        async with contextlib.aclosing(status.follow(read_fd)) as said:
            async for report in said:
                match report:
                    case status.Ready(facts):
                        child.facts, child.stage, child.fraction = facts, "ready", 1.0
                        assert child.process is not None
                        give_way(child.process.pid, child.spec.nice)
                        child.ready.set()
                    case status.Failed(message):
                        child.failure = message
                    case status.Progress(stage, fraction):
                        child.stage, child.fraction = stage, fraction
                self._on_change()

    async def _until_ready(self, child: Child) -> None:
        assert child.process is not None
        ready = asyncio.create_task(child.ready.wait())
        ended = asyncio.create_task(child.process.wait())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            ended.cancel()
        if not child.ready.is_set():
            assert child.follower is not None
            # Its last report may still be in the status pipe.
            await asyncio.wait({child.follower}, timeout=1.0)
            raise _start_failure(child)

    def _watch(self, child: Child) -> asyncio.Task[None]:
        watcher = asyncio.create_task(self._keep_alive(child))
        watcher.add_done_callback(_tell_failure)
        return watcher

    async def _keep_alive(self, child: Child) -> None:
        """Restarts a process for as long as it keeps dying, less and less eagerly while it keeps dying soon."""
        loop = asyncio.get_running_loop()
        delay_s = 0.0  # streams wait for it
        while not self._stopping:
            assert child.process is not None
            began_at = loop.time()
            code = await child.process.wait()
            if loop.time() - began_at > STEADY_AFTER_S:
                delay_s = 0.0
            facts = {"child": child.spec.instance_id, "pid": child.pid, "exit_code": code}
            text = "%s %s; it is started again after %.1f s; its log: %s"
            why = cause_of_death(code, child.failure or last_lines(child.log_path))
            log.error(text, child.spec.instance_id, why, delay_s, child.log_path, extra=facts)
            child.stage, child.fraction = "restarting", None
            child.ready.clear()
            self._on_change()
            await asyncio.sleep(delay_s)
            await self._may_restart()
            delay_s = min(max(delay_s * 2, FIRST_RESTART_DELAY_S), LAST_RESTART_DELAY_S)
            child.restarts += 1
            try:
                await self._spawn(child)
            except OSError:  # no memory, no descriptor: the old process's end is found again
                log.exception("%s could not be started", child.spec.instance_id)


@contextlib.contextmanager
def _log_of(child: Child) -> Iterator[int]:
    """Descriptor of where it writes: its log; where that cannot be opened, as on a disk that is full or has turned
    read-only, what the launcher writes to. Its first start has no such way out."""
    try:
        log_fd = os.open(child.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
    except OSError as error:
        if child.process is None:
            raise
        log.error("%s has no log, and writes here: %s", child.spec.instance_id, error)
        yield _STDERR
        return
    try:
        yield log_fd
    finally:
        os.close(log_fd)


def _tell_failure(watcher: asyncio.Task[None]) -> None:
    """Nobody awaits a watcher, and without one its process is never started again."""
    if not watcher.cancelled() and (error := watcher.exception()) is not None:
        log.error("a process is not watched any more", exc_info=error)


def cause_of_death(exit_code: int, last_words: str) -> str:
    """In half a sentence. `exit_code`: as asyncio tells it, below 0 for a signal; `last_words`: the end of its log."""
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:  # most real-time signals have none
            name = f"signal {-exit_code}"
        hint = ", maybe for lack of memory (dmesg)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    said = last_words.rpartition("\n")[2].strip()
    return f"ended with exit code {exit_code}" + (f", saying: {said}" if said else "")


def last_lines(path: Path) -> str:
    """The end of a log file; empty when it is gone."""
    try:
        with path.open(errors="replace") as file:
            return "".join(deque(file, LAST_LINES)).rstrip()
    except OSError:
        return ""


def _start_failure(child: Child) -> MoonserveError:
    assert child.process is not None
    if child.process.returncode == EXIT_CONFIG and child.failure:
        return ConfigError(child.failure)
    code = child.process.returncode
    message = (
        f"{child.spec.instance_id} ended with exit code {code} before it was "
        f"ready; its last log lines ({child.log_path}):\n{last_lines(child.log_path)}"
    )
    return ChildDied(message, EXIT_CONFIG if code == EXIT_CONFIG else 1)


async def _end(child: Child) -> None:
    """In order, and by force once its grace is over. Nothing happens where it has ended."""
    process, grace_s = child.process, child.spec.stop_grace_s
    if process is None or process.returncode is not None:
        return
    _signal(process, signal.SIGTERM)
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        log.warning("pid %d did not stop in %g s: killing it", process.pid, grace_s)
        _signal(process, signal.SIGKILL)
        await process.wait()


def give_way(pid: int, nice: int) -> None:
    """Lowers the priority of all threads of a session, given its leader: among its like, and where the kernel weighs
    sessions (sched_autogroup, sched(7)) also that of the session. Done once a process is ready: one that starts at low
    priority on a busy machine gets so little of the processor that it never becomes ready."""
    if not nice:
        return
    with contextlib.suppress(OSError):  # it has ended, or there are no autogroups
        os.setpriority(os.PRIO_PGRP, pid, nice)
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except ProcessLookupError:
        log.debug("pid %d was gone already", process.pid)
