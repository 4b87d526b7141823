"""The actor of one process of the cluster: starts it as `moonserve serve` would, restarts it, and reports its state.

Before it starts the process, it asks Ray whether it is still the actor of that name. An actor that was given up but
lives behind a partition learns of it this way, ends its process and itself, and never displaces its successor. Knows
nothing of other processes except their addresses.
"""

import asyncio
import logging
import os
import secrets
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from moonserve.deploy.launcher.local_cluster import endpoint_is_ready
from moonserve.deploy.launcher.model_check import model_folder
from moonserve.deploy.launcher.process_specs import HostOptions, ProcessKind, ProcessSpec
from moonserve.deploy.launcher.supervisor import Supervisor, child_environment, last_lines, log_folder
from moonserve.deploy.ray.config import ClusterConfig
from moonserve.deploy.ray.events import READY, Report
from moonserve.deploy.ray.processes import Addresses, PlannedProcess, process_spec, serve_config
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.process import logs

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread, which runs until the process ends."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._held: set[Any] = set()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def run(self, body: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the loop and returns its result. The caller is in another thread."""
        return asyncio.run_coroutine_threadsafe(body, self._loop).result()

    def begin(self, body: Coroutine[Any, Any, None]) -> None:
        """Starts a coroutine in the loop and keeps a reference until it ends."""
        future = asyncio.run_coroutine_threadsafe(body, self._loop)
        self._held.add(future)
        future.add_done_callback(self._held.discard)


log = logging.getLogger(__name__)

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 15.0
JOIN_POLL_S = 0.1
JOINING, STOPPED = "joining", "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Complete input of an actor."""

    config: ClusterConfig
    unit: PlannedProcess
    addresses: Addresses
    host: str  # the host's address
    home: str | None  # the store node on that host
    cluster_token: str

    @property
    def name(self) -> str:
        return self.unit.name(self.config)


class ProcessLives:
    """Successive lives of the process, in one event loop. A life lasts until it is ended on purpose. Within a life, the
    supervisor restarts a process that dies."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._id = secrets.token_hex(4)
        self._number = 0  # deliberate restarts
        self._ending = asyncio.Lock()  # held while a life is ended
        self._start: asyncio.Task[None] | None = None  # None = the life was ended
        self._supervisor: Supervisor | None = None
        self._failure: str | None = None
        self._has_joined = False

    async def begin(self) -> None:
        self._supervisor = self._failure = None
        self._has_joined = self._assignment.unit.kind is not ProcessKind.GATEWAY
        self._start = asyncio.create_task(self._until_started())

    async def report(self) -> Report:
        known = Report(life=self._number, actor=self._id, failure=self._failure)
        if self._start is None:
            return replace(known, stage=STOPPED, failure=None)
        child = next(iter(self._supervisor.children), None) if self._supervisor else None
        if child is None:
            return known
        is_joining = child.stage == READY and not self._has_joined
        return replace(
            known,
            stage=JOINING if is_joining else child.stage,
            fraction=child.fraction,
            facts=dict(child.facts),
            restarts=child.restarts,
            pid=child.pid,
        )

    async def restart(self, number: int) -> None:
        async with self._ending:
            if number > self._number:
                self._number = number
                await self._end()
                await self.begin()

    async def end(self) -> None:
        """Drains and stops the process."""
        async with self._ending:
            await self._end()

    async def _end(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            start.cancel()
            await asyncio.wait({start})
        if self._supervisor is not None:
            await self._supervisor.stop()

    async def _until_started(self) -> None:
        delay_s = FIRST_RETRY_S
        while not await self._try():
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LAST_RETRY_S)

    async def _try(self) -> bool:
        await self._wait_until_current()
        try:
            spec = await asyncio.to_thread(_spec, self._assignment)
            self._supervisor = _supervisor(self._assignment, self._wait_until_current)
            [child] = await self._supervisor.start([spec])
        except (MoonserveError, OSError) as error:
            log.warning("%s cannot start: %s", self._assignment.name, error)
            self._failure = str(error)
            if self._supervisor is not None:
                await self._supervisor.stop()
            return False
        self._failure = None
        while not self._has_joined:
            self._has_joined = await asyncio.to_thread(endpoint_is_ready, child.facts["http"])
            await asyncio.sleep(JOIN_POLL_S)
        return True

    async def _wait_until_current(self) -> None:
        """Waits while Ray does not answer. Ends this actor and its process if the name is no longer this actor's."""
        is_current = await asyncio.to_thread(_is_current, self._assignment)
        while is_current is None:
            await asyncio.sleep(FIRST_RETRY_S)
            is_current = await asyncio.to_thread(_is_current, self._assignment)
        if not is_current:
            log.warning("%s has been replaced: ending", self._assignment.name)
            os._exit(0)  # its process ends with it, and a Ray worker needs no cleanup


class ProcessActor:
    """A Ray actor with calls from several threads. It has no coroutine methods: with one, Ray would run all calls in
    one event loop."""

    def __init__(self, assignment: Assignment) -> None:
        serve = assignment.config.serve
        logs.configure(assignment.name, log_format=serve.log_format, level=serve.log_level)
        self._assignment = assignment
        self._loop = LoopThread("agent")
        self._lives = ProcessLives(assignment)
        self._loop.run(self._lives.begin())

    def report(self) -> Report:
        """Returns the current state without waiting for the process."""
        return self._loop.run(self._lives.report())

    def restart(self, life: int) -> None:
        """Ends the process in order and starts it again. Returns before that is done."""
        self._loop.begin(self._lives.restart(life))

    def stop(self) -> None:
        """Ends the process and returns when it has ended."""
        self._loop.run(self._lives.end())

    def tail(self) -> str:
        """Returns the last lines of the process's log."""
        return last_lines(log_dir(self._assignment.config) / f"{self._assignment.name}.log")


def _is_current(assignment: Assignment) -> bool | None:
    """Returns True if this actor is still the one of its name; None if Ray does not answer."""
    import ray

    try:
        found = ray.get_actor(assignment.name, namespace=assignment.config.namespace)
    except ValueError:  # no actor has the name
        return False
    except Exception as error:  # any error of Ray while its head is away
        log.warning("Ray does not answer whether this actor is still %s: %s", assignment.name, error)
        return None
    is_own: bool = found._actor_id.hex() == ray.get_runtime_context().get_actor_id()
    return is_own


def _spec(assignment: Assignment) -> ProcessSpec:
    """Returns the process's spec. May download the model. Raises ConfigError."""
    config, unit = assignment.config, assignment.unit
    needs_model = unit.kind in (ProcessKind.PREFILL, ProcessKind.DECODE, ProcessKind.GATEWAY)
    site = HostOptions(
        conductor=assignment.addresses.conductors,
        model_path=str(model_folder(config.serve, is_one_host=False)) if needs_model else "",
        host=assignment.host,
        ledger=str(log_dir(config) / "kv-memory"),
        drain_s=config.drain_s,
    )
    serve = serve_config(config, assignment.addresses)
    return process_spec(config, unit, serve, site, assignment.home)


def _supervisor(assignment: Assignment, may_restart: Callable[[], Awaitable[None]]) -> Supervisor:
    config, unit = assignment.config, assignment.unit
    workers = config.decode if unit.kind is ProcessKind.DECODE else config.prefill
    num_threads = config.serve.num_threads or workers.num_threads
    environment = child_environment(os.environ, assignment.cluster_token, num_threads)
    environment["PYTHONPATH"] = os.pathsep.join(_import_path_without_ray())
    folder = log_dir(config)
    folder.mkdir(parents=True, exist_ok=True)
    return Supervisor(folder, environment, lambda: None, may_restart)


def _import_path_without_ray() -> list[str]:
    """Returns the import path without Ray's own copies of libraries, which are first in Ray's workers."""
    import ray

    own = str(Path(ray.__file__).parent)
    return [path for path in sys.path if path and not path.startswith(own)]


def log_dir(config: ClusterConfig) -> Path:
    """Returns the folder for the logs of all processes on a host."""
    return log_folder(config.serve.log_dir, f"ray-{config.name}")
