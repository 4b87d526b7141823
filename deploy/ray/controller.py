"""The actor that keeps a cluster on Ray in its planned state: the shell of `deploy.ray.state`.

Twice a second it reads hosts, actors and the conductor's view, and executes the actions that the state decides. Every
change that a successor must know is first written to Ray's head, so that Ray can restart this actor like any other.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError

from moonserve.conductor.role_switching import WorkerLoad
from moonserve.deploy.launcher.rolling_restart import cluster_members
from moonserve.deploy.ray import ray_calls
from moonserve.deploy.ray.config import ClusterConfig
from moonserve.deploy.ray.events import (
    Action,
    ActorEnded,
    ActorReported,
    Event,
    Host,
    HostsObserved,
    Kill,
    MembersObserved,
    Report,
    Restart,
    Start,
    Stop,
)
from moonserve.deploy.ray.process_actor import Assignment, LoopThread
from moonserve.deploy.ray.state import ControllerState
from moonserve.protocol.errors import ConfigError, MoonserveError
from moonserve.protocol.membership.conductor_client import ConductorClient
from moonserve.protocol.pb import conductor_pb2
from moonserve.protocol.process import logs
from moonserve.protocol.request import InstanceId, Role
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.protocol.rpc.wire import role_from_wire

PLACING = Report(stage="placing")  # until its actor has answered


def status_of(state: ControllerState) -> dict[str, Any]:
    """Returns the status of the cluster in JSON types."""
    return {
        "name": state.config.name,
        "is_whole": state.is_whole,
        "is_restarting": state.is_restarting,
        "is_ending": state.is_ending,
        "wanted": {str(kind): count for kind, count in state.wanted.counts().items()},
        "missing": state.missing(),
        "processes": [
            {
                **asdict(process.report or PLACING),
                "name": process.name,
                "kind": str(process.unit.kind),
                "node_id": process.node_id,
                "host": state.address_of(process),
                "generation": process.generation,
                "is_leaving": process.is_leaving,
            }
            for process in sorted(state.processes.values(), key=lambda each: each.unit)
        ],
    }


def members_of(views: Sequence[conductor_pb2.InstanceView]) -> MembersObserved:
    """Converts the conductor's view into an event."""
    return MembersObserved(
        epochs={view.endpoint.instance_id: view.endpoint.epoch for view in views},
        loads=[
            WorkerLoad(
                instance_id=InstanceId(view.endpoint.instance_id),
                role=role,
                can_change=view.can_switch_role,
                draining=view.draining,
                need=view.need,
                use=view.use,
            )
            for view in views
            if (role := role_from_wire(view.role)) is not Role.STORE
        ],
    )


log = logging.getLogger(__name__)

POLL_EVERY_S = 0.5
ANSWER_WITHIN_S = 2.0
PROBE_WITHIN_S = 1.0
TAIL_WITHIN_S = 10.0
NUM_EVENTS = 100
# In addition to the drain: for the process's end and the calls through Ray.
STOP_GRACE_S = 20.0


class Controller:
    """A Ray actor with calls from several threads. It has no coroutine methods: with one, Ray would run all calls in
    one event loop."""

    def __init__(self, config: ClusterConfig, cluster_token: str) -> None:
        logs.configure("controller", log_format=config.serve.log_format, level=config.serve.log_level)
        self._config = config
        self._loop = LoopThread("controller")
        self._control_loop = ControlLoop(config, cluster_token)
        self._loop.begin(self._control_loop.run())

    def status(self) -> dict[str, Any]:
        """Returns `ControlLoop.status`."""
        return self._loop.run(self._control_loop.status())

    def apply(self, event: Event) -> str:
        """Applies an operator's event. Returns "" or the reason why it is refused."""
        return self._loop.run(self._control_loop.apply(event))

    def tail(self, name: str) -> str:
        """Returns the end of a process's log. Raises ConfigError if there is no such process."""
        actor = ray_calls.find_actor(self._config, name)
        if actor is None:
            raise ConfigError(f"there is no process {name}; `moonserve deploy status` lists all")
        text: str = ray.get(actor.tail.remote(), timeout=TAIL_WITHIN_S)
        return text


class ControlLoop:
    """Work of the controller, in one event loop."""

    def __init__(self, config: ClusterConfig, cluster_token: str) -> None:
        self._config = config
        self._token = cluster_token
        self._state = ControllerState(config)
        record = ray_calls.read_record(config)
        if record is not None:
            log.warning("continuing from the record of an earlier controller")
            self._state.restore(record)
        self._written = record
        self._actors: dict[str, tuple[int, Any]] = {}  # generation and handle
        self._starting: set[str] = set()  # names whose actors are being created
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[str, asyncio.Lock] = {}  # actions on one name run in order
        self._channels = Channels(cluster_token, config.serve.tls())
        self._conductors: ConductorClient | None = None
        self._events: deque[tuple[float, str]] = deque(maxlen=NUM_EVENTS)  # for operators

    async def apply(self, event: Event) -> str:
        """Applies an operator's event. Returns "" or the reason why it is refused."""
        try:
            self._handle(event)
        except ConfigError as error:
            return error.message
        return ""

    async def status(self) -> dict[str, Any]:
        """Returns the status of the cluster, and recent events for operators, in JSON types."""
        return {
            **status_of(self._state),
            "has_ended": self._has_ended and not self._tasks,
            "events": list(self._events),
            "controller_pid": os.getpid(),
            "controller_node_id": ray.get_runtime_context().get_node_id(),
        }

    @property
    def _has_ended(self) -> bool:
        return self._state.is_ending and not self._state.processes

    # -- the loop

    async def run(self) -> None:
        """Looks at the cluster regularly until the process ends."""
        while True:
            began_at = time.monotonic()
            try:
                await self._poll()
            except Exception:  # if the loop ended, nothing would watch the cluster
                log.exception("polling the cluster failed")
            await asyncio.sleep(max(0.05, POLL_EVERY_S - (time.monotonic() - began_at)))

    async def _poll(self) -> None:
        if self._has_ended:
            await asyncio.to_thread(ray_calls.drop_record, self._config)
            return
        self._handle(HostsObserved(hosts=await self._hosts()))
        await asyncio.gather(self._poll_members(), *map(self._poll_actor, list(self._state.processes)))
        await self._write_record()

    def _handle(self, event: Event) -> None:
        for action in self._state.handle(event, time.monotonic()):
            self._perform(action)

    async def _write_record(self) -> None:
        record = self._state.to_record()
        if record != self._written:
            await asyncio.to_thread(ray_calls.write_record, self._config, record)
            self._written = record

    # -- looking

    async def _hosts(self) -> list[Host]:
        found = await asyncio.to_thread(ray_calls.nodes)
        return list(await asyncio.gather(*(_probed(host, port) for host, port in found)))

    async def _poll_members(self) -> None:
        if self._state.addresses is None:
            return
        if self._conductors is None:  # created once, since the addresses do not change
            self._conductors = ConductorClient(self._channels, self._state.addresses.conductors)
        try:
            found = await cluster_members(self._conductors, ANSWER_WITHIN_S)
        except MoonserveError as error:
            log.debug("no conductor answers: %s", error)
        else:
            self._handle(members_of(found))

    async def _poll_actor(self, name: str) -> None:
        process = self._state.processes.get(name)
        if process is None or name in self._starting or process.is_leaving:
            return
        generation = process.generation
        actor = await self._actor(name, generation)
        if actor is None:
            self._handle(ActorEnded(name=name, generation=generation, reason="Ray knows no such actor"))
            return
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                report = await actor.report.remote()
        except ActorDiedError as error:
            self._log_event(f"{name} ended: {error}")
            await asyncio.to_thread(ray_calls.end_actor, self._config, name, generation, None)
            self._handle(ActorEnded(name=name, generation=generation, reason="its actor died"))
        except (TimeoutError, RayActorError):
            self._handle(ActorReported(name=name, generation=generation, report=None))
        else:
            self._handle(ActorReported(name=name, generation=generation, report=report))

    async def _actor(self, name: str, generation: int) -> Any | None:
        known = self._actors.get(name)
        if known is not None and known[0] == generation:
            return known[1]
        actor = await asyncio.to_thread(ray_calls.find_actor, self._config, name)
        if actor is not None:
            self._actors[name] = (generation, actor)
        return actor

    # -- doing

    def _perform(self, action: Action) -> None:
        match action:
            case Start():
                self._starting.add(action.name)
                self._log_event(f"{action.name} starts on {action.host.address}")
                self._begin(action.name, self._start(action))
            case Stop():
                self._log_event(f"{action.name} drains and leaves")
                self._begin(action.name, self._stop(action))
            case Kill():
                self._log_event(f"{action.name} is given up: {action.reason}")
                self._begin(action.name, self._end(action.name, action.generation))
            case Restart():
                self._log_event(f"{action.name} restarts")
                self._begin(action.name, self._restart(action))

    def _begin(self, name: str, body: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._in_turn(name, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _in_turn(self, name: str, body: Coroutine[Any, Any, None]) -> None:
        async with self._turns.setdefault(name, asyncio.Lock()):
            await body

    async def _start(self, action: Start) -> None:
        assert self._state.addresses is not None
        assignment = Assignment(
            config=self._config,
            unit=action.unit,
            addresses=self._state.addresses,
            host=action.host.address,
            home=action.home,
            cluster_token=self._token,
        )
        try:
            # Before the actor exists, so that a successor of this controller finds it.
            await self._write_record()
            made = await asyncio.to_thread(ray_calls.create_actor, assignment, action.host, action.generation)
        except (MoonserveError, RayActorError, ValueError) as error:
            self._log_event(f"{action.name} cannot start on {action.host.address}: {error}")
            await asyncio.to_thread(ray_calls.end_actor, self._config, action.name, action.generation, None)
            self._handle(ActorEnded(name=action.name, generation=action.generation, reason=str(error)))
        else:
            self._actors[action.name] = (action.generation, made)
        finally:
            self._starting.discard(action.name)

    async def _stop(self, action: Stop) -> None:
        actor = await self._actor(action.name, action.generation)
        if actor is not None:
            with contextlib.suppress(TimeoutError, RayActorError):
                async with asyncio.timeout(self._config.drain_s + STOP_GRACE_S):
                    await actor.stop.remote()
        await self._end(action.name, action.generation)
        self._log_event(f"{action.name} has left")
        self._handle(ActorEnded(name=action.name, generation=action.generation))

    async def _end(self, name: str, generation: int) -> None:
        actor = await self._actor(name, generation)
        self._actors.pop(name, None)
        await asyncio.to_thread(ray_calls.end_actor, self._config, name, generation, actor)

    async def _restart(self, action: Restart) -> None:
        actor = await self._actor(action.name, action.generation)
        if actor is not None:
            with contextlib.suppress(RayActorError):  # then Ray restarts the actor, or it is given up
                await actor.restart.remote(action.life)

    def _log_event(self, text: str) -> None:
        log.info("%s", text)
        self._events.append((time.time(), text))


async def _probed(host: Host, port: int) -> Host:
    """Returns the host; `answers` is False if its raylet takes no connection."""
    try:
        async with asyncio.timeout(PROBE_WITHIN_S):
            _, writer = await asyncio.open_connection(host.address, port)
            writer.close()
            return host
    except (OSError, TimeoutError):
        return replace(host, answers=False)
