"""Starts processes, follows their progress, restarts those that die, and stops all of them.

Rules: a process that dies before it is ready fails the whole start, with its last log lines. One that dies later is
restarted with the same options, first at once, then with growing delays. One that is replaced on request ends in order;
if two may overlap and the successor fails, the old one serves on. In every case `stop` leaves no process behind.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from moonserve.deploy.launcher.process_specs import ProcessSpec
from moonserve.protocol.errors import ConfigError, MoonserveError
from moonserve.protocol.process import child_process
from moonserve.protocol.process.config import ENV_PREFIX, EXIT_CONFIG
from moonserve.protocol.process.event_loop import cancel_all

log = logging.getLogger(__name__)

# -- settings that a launcher derives from its machine


def child_environment(inherited: Mapping[str, str], cluster_token: str, num_threads: int) -> dict[str, str]:
    """Returns the launcher's environment for its processes. moonserve's own variables are removed: they configure the
    launcher, which passes them on as flags. `num_threads`: compute threads of a worker."""
    foreign = {k: v for k, v in inherited.items() if not k.startswith(ENV_PREFIX)}
    return {
        **foreign,
        f"{ENV_PREFIX}CLUSTER_TOKEN": cluster_token,
        "OMP_NUM_THREADS": str(num_threads),
        "PYTHONUNBUFFERED": "1",
        # The packages may be in the current folder instead of site-packages.
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }


def log_folder(named: str | None, own: str) -> Path:
    """Returns the folder for logs, which need not exist: `named`, or else `own` in moonserve's state folder."""
    if named is not None:
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "moonserve" / own


# -- processes

LAST_LINES = 15
FIRST_RESTART_DELAY_S = 0.5  # for a process that dies again soon; the first restart has no delay
LAST_RESTART_DELAY_S = 30.0
_STDERR = 2
STEADY_AFTER_S = 60.0  # a process that ran this long is restarted at once


class ChildDied(MoonserveError):
    """A process ended before it was ready. `exit_code`: the exit code for the launcher itself."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True, eq=False)
class Child:
    """One process and its last status report."""

    spec: ProcessSpec
    log_path: Path
    process: asyncio.subprocess.Process | None = None
    stage: str = "starting"
    fraction: float | None = None
    facts: dict[str, str] = field(default_factory=dict)  # from its ready report
    failure: str | None = None  # the error that it reported when it could not start
    restarts: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    follower: asyncio.Task[None] | None = None  # reads its status pipe
    watcher: asyncio.Task[None] | None = None  # restarts it when it dies; set once it was ready

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None


async def _at_once() -> None:
    """Permits every restart."""


class Supervisor:
    """Owner of the processes of one launcher."""

    def __init__(
        self,
        log_dir: Path,
        environment: Mapping[str, str],
        on_change: Callable[[], None],
        may_restart: Callable[[], Awaitable[None]] = _at_once,
    ) -> None:
        """`on_change`: called after each change of a process's stage. `may_restart`: returns when a dead process may be
        restarted; it is for a launcher whose place another may have taken."""
        self.children: list[Child] = []
        self._log_dir = log_dir
        self._environment = environment
        self._on_change = on_change
        self._may_restart = may_restart
        # Replaced processes that are still running, by the task that waits for their end.
        self._leaving: dict[asyncio.Task[int], Child] = {}
        self._stopping = False

    async def start(self, specs: list[ProcessSpec]) -> list[Child]:
        """Starts processes concurrently and returns when all are ready. Raises ChildDied or ConfigError."""
        children = [Child(spec, self._log_dir / f"{spec.instance_id}.log") for spec in specs]
        self.children += children
        for child in children:
            await self._begin(child)
        waits = [asyncio.create_task(self._until_ready(child)) for child in children]
        try:
            await asyncio.gather(*waits)
        finally:
            await cancel_all(waits)
        for child in children:
            child.watcher = self._watch(child)
        return children

    async def stop(self) -> None:
        """Ends every process with SIGTERM, and with SIGKILL if it takes longer than its grace period."""
        self._stopping = True
        await cancel_all([child.watcher for child in self.children if child.watcher])
        children = [*self.children, *self._leaving.values()]
        await asyncio.gather(*(_end(child) for child in children))
        await cancel_all([child.follower for child in children if child.follower])

    async def restart(self, child: Child) -> None:
        """Replaces a ready process and returns when its successor is ready. A process that `overlaps` ends after the
        work that it had begun, however long that takes. Raises ChildDied or ConfigError if the successor fails. Then
        an overlapping process serves on, and any other is restarted repeatedly."""
        assert child.watcher is not None, "it was ready"
        await cancel_all([child.watcher])
        try:
            if child.spec.overlaps:
                await self._replace_overlapping(child)
            else:
                child.stage = "stopping"
                self._on_change()
                await _end(child)
                await self._restart_process(child)
        finally:
            child.watcher = self._watch(child)

    async def _replace_overlapping(self, child: Child) -> None:
        old = replace(child)
        try:
            await self._restart_process(child)
        except BaseException:  # also if cancelled: `child` is the old process again, which still serves
            if child.process is not old.process:
                await asyncio.shield(_end(child))
            child.process, child.follower = old.process, old.follower
            child.stage, child.facts = old.stage, old.facts
            raise
        assert old.process is not None
        with contextlib.suppress(ProcessLookupError):
            old.process.send_signal(signal.SIGUSR1)
        leaving = asyncio.create_task(old.process.wait())
        self._leaving[leaving] = old
        leaving.add_done_callback(self._leaving.pop)

    async def _restart_process(self, child: Child) -> None:
        """Starts a new process for `child` and waits until it is ready."""
        child.ready, child.failure = asyncio.Event(), None
        child.stage, child.fraction = "restarting", None
        self._on_change()
        await self._begin(child)
        await self._until_ready(child)
        child.restarts += 1

    async def _begin(self, child: Child) -> None:
        """Starts the process. Raises ChildDied if the operating system cannot create it."""
        try:
            await self._spawn(child)
        except OSError as error:
            text = f"{child.spec.instance_id} could not be started: {error}"
            raise ChildDied(text, exit_code=1) from error

    async def _spawn(self, child: Child) -> None:
        child.failure = None
        with _log_of(child) as log_fd:
            child.process, read_fd = await child_process.spawn(
                (*child.spec.argv, *child.spec.flags),
                {**self._environment, **child.spec.environment},
                child.spec.fds,
                python=child.spec.python,
                log_fd=log_fd,
            )
        child.follower = asyncio.create_task(self._follow_status(child, read_fd))

    async def _follow_status(self, child: Child, read_fd: int) -> None:
        """Applies the reports from the process's status pipe until the pipe ends."""
        async with contextlib.aclosing(child_process.read_reports(read_fd)) as said:
            async for report in said:
                match report:
                    case child_process.StartReady(facts):
                        child.facts, child.stage, child.fraction = facts, "ready", 1.0
                        assert child.process is not None
                        lower_priority(child.process.pid, child.spec.nice)
                        child.ready.set()
                    case child_process.StartFailed(message):
                        child.failure = message
                    case child_process.StartProgress(stage, fraction):
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
        watcher.add_done_callback(_log_failure)
        return watcher

    async def _keep_alive(self, child: Child) -> None:
        """Restarts a process whenever it dies, with growing delays while it dies soon after each start."""
        loop = asyncio.get_running_loop()
        delay_s = 0.0  # running streams wait for the restart
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
            except OSError:  # no memory or descriptor: the next round sees the old process's end again
                log.exception("%s could not be started", child.spec.instance_id)


@contextlib.contextmanager
def _log_of(child: Child) -> Iterator[int]:
    """Yields the descriptor of the process's log. If a restart cannot open the log, for example because the disk is
    full or read-only, it is the launcher's stderr. On the first start, the OSError is raised instead."""
    try:
        log_fd = os.open(child.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
    except OSError as error:
        if child.process is None:
            raise
        log.error("cannot open the log of %s, which writes here instead: %s", child.spec.instance_id, error)
        yield _STDERR
        return
    try:
        yield log_fd
    finally:
        os.close(log_fd)


def _log_failure(watcher: asyncio.Task[None]) -> None:
    """Logs the failure of a watcher: no task awaits it, and without a watcher its process is never restarted."""
    if not watcher.cancelled() and (error := watcher.exception()) is not None:
        log.error("a process is no longer watched and will not be restarted", exc_info=error)


def cause_of_death(exit_code: int, last_words: str) -> str:
    """Describes a process's end. `exit_code`: below 0 for a signal, as in asyncio; `last_words`: end of its log."""
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
    """Returns the last `LAST_LINES` lines of a log file, or "" if it cannot be read."""
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
    """Ends a process with SIGTERM, and with SIGKILL after its grace period. Does nothing if it has ended."""
    if child.process is not None:
        child_process.terminate(child.process)
        await child_process.wait_or_kill(child.process, child.spec.stop_grace_s)


def lower_priority(pid: int, nice: int) -> None:
    """Lowers the priority of all threads of a session. `pid`: its leader. Where the kernel schedules whole sessions
    (sched_autogroup, sched(7)), the session's priority is lowered too. Called once a process is ready: a process that
    starts at low priority on a busy machine gets too little CPU time ever to become ready."""
    if not nice:
        return
    with contextlib.suppress(OSError):  # the process has ended, or there are no autogroups
        os.setpriority(os.PRIO_PGRP, pid, nice)
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))
