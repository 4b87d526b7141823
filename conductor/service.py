"""The conductor's gRPC service: the only part that awaits, reads the clock, logs and updates metrics.

Every call becomes one event for `ConductorState` and is answered from the resulting actions, without awaiting in
between. A housekeeping task sends ticks, so that silent instances are noticed even when no calls arrive.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc.aio
from prometheus_client import CollectorRegistry

from conductor import wire
from conductor.admission import REASONS
from conductor.config import ConductorConfig
from conductor.events import (
    Action,
    Away,
    Deregister,
    Deregistered,
    Event,
    HeartbeatSeen,
    InstanceJoined,
    InstanceRemoved,
    Placed,
    PlacementForgotten,
    Refused,
    Registered,
    Rejected,
    Reported,
    RoleChangeDue,
    Tick,
    TtftObserved,
)
from conductor.leadership.standby import SoleLeadership, serve_among_others, serving
from conductor.state import ConductorState
from conductor.view import SeenGateways
from protocol.errors import MoonserveError
from protocol.garbage import seldom_collected
from protocol.held_tasks import HeldTasks
from protocol.ids import Role
from protocol.logs import of
from protocol.metrics import SchedulerMetrics, exposed
from protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, worker_pb2, worker_pb2_grpc
from protocol.process import Lifecycle, running
from protocol.request import Placement
from protocol.rpc import Channels, failure_to_wire
from protocol.scraping import process_registry
from protocol.tracing import Tracer, tracing
from protocol.wire import from_message, role_to_wire, to_message

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
R = TypeVar("R")

_ROLE_TIMEOUT_S = 5.0


class RoleCommands:
    """Sends role changes to workers. Best effort: the role controller repeats a change while it is needed. Owns
    `channels` and closes them."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._tasks = HeldTasks()

    def send(self, change: RoleChangeDue) -> None:
        """Starts sending the change and returns at once."""
        self._tasks.start(self._send(change))

    async def close(self) -> None:
        await self._tasks.cancel()
        await self._channels.close()

    async def _send(self, change: RoleChangeDue) -> None:
        address = change.endpoint.rpc_address
        stub = worker_pb2_grpc.RoleSwitchStub(self._channels.to(address))
        request = worker_pb2.SwitchRoleRequest(role=role_to_wire(change.role))
        try:
            await self._channels.call(stub.SwitchRole, request, timeout_s=_ROLE_TIMEOUT_S)
        except MoonserveError as error:
            log.warning(
                "%s does not become a %s worker: %s",
                change.endpoint.instance_id,
                change.role,
                error,
            )
        finally:
            await self._channels.forget(address)  # the worker gets a new address with its new role


class ConductorService(conductor_pb2_grpc.ConductorServicer):
    """Implements the `Conductor` service on top of a `ConductorState`."""

    def __init__(
        self,
        state: ConductorState,
        metrics: SchedulerMetrics,
        clock: Callable[[], float] = time.monotonic,
        role_commands: RoleCommands | None = None,
        tracer: Tracer | None = None,
        away_after_s: float = math.inf,
    ) -> None:
        """`role_commands`: required if the state changes roles. `away_after_s`: if the last housekeeping is longer ago
        than this, the process or its machine is taken to have been suspended."""
        self._state = state
        self._metrics = metrics
        self._clock = clock
        self._role_commands = role_commands
        self._tracer = tracer or Tracer()
        self._gateways = SeenGateways()
        self._away_after_s = away_after_s
        self._kept_house_at = math.inf

    async def Register(self, request: conductor_pb2.RegisterRequest, context: Context) -> conductor_pb2.RegisterReply:
        reply = self._ask(wire.register_from_wire(request), Registered)
        return conductor_pb2.RegisterReply(heartbeat_interval_s=reply.heartbeat_interval_s, lease_s=reply.lease_s)

    async def Heartbeat(
        self, request: conductor_pb2.HeartbeatRequest, context: Context
    ) -> conductor_pb2.HeartbeatReply:
        reply = self._ask(wire.heartbeat_from_wire(request), HeartbeatSeen)
        return conductor_pb2.HeartbeatReply(known=reply.known, resync=reply.resync)

    async def Deregister(
        self, request: conductor_pb2.DeregisterRequest, context: Context
    ) -> conductor_pb2.DeregisterReply:
        self._ask(from_message(Deregister, request), Deregistered)
        return conductor_pb2.DeregisterReply()

    async def Place(self, request: conductor_pb2.PlaceRequest, context: Context) -> conductor_pb2.PlaceReply:
        began_at = self._clock()
        reply = self._handle(wire.place_from_wire(request), request.request_id)[-1]
        if request.traceparent:
            self._trace(request.traceparent, reply, began_at)
        match reply:
            case Placed():
                return conductor_pb2.PlaceReply(placement=to_message(common_pb2.Placement, reply.placement))
            case Rejected():
                return conductor_pb2.PlaceReply(overloaded=to_message(conductor_pb2.Overloaded, reply))
            case Refused():
                return conductor_pb2.PlaceReply(failure=failure_to_wire(reply.error))
        raise AssertionError(f"{reply} does not answer a placement")

    def _trace(self, traceparent: str, reply: Action, began_at: float) -> None:
        attributes: dict[str, str | int | float | bool] = {"outcome": type(reply).__name__.lower()}
        match reply:
            case Placed(placement=placement):
                attributes["prefill_instance"] = placement.prefill.instance_id
                attributes["decode_instance"] = placement.decode.instance_id
                attributes["predicted_ttft_s"] = placement.predicted_ttft_s
            case Rejected(reason=reason):
                attributes["reason"] = reason
        self._tracer.span("place", traceparent, began_at, self._clock(), **attributes)

    async def Report(self, request: conductor_pb2.ReportRequest, context: Context) -> conductor_pb2.ReportReply:
        self._ask(wire.report_from_wire(request), Reported)
        return conductor_pb2.ReportReply()

    async def GetCluster(self, request: conductor_pb2.GetClusterRequest, context: Context) -> conductor_pb2.ClusterView:
        now = self._clock()
        if request.HasField("gateway"):
            self._gateways.saw(request.gateway, now)
        reply = wire.cluster_to_wire(self._state.cluster(now))
        reply.gateways.extend(self._gateways.present(now))
        return reply

    async def Explain(self, request: conductor_pb2.ExplainRequest, context: Context) -> conductor_pb2.ExplainReply:
        decision = self._state.explain(request.request_id)
        return conductor_pb2.ExplainReply(
            found=decision is not None,
            decision_json="" if decision is None else decision.to_json(),
            num_decisions=len(self._state.decisions),
            max_decisions=self._state.decisions.capacity,
        )

    async def housekeep(self, interval_s: float) -> None:
        """Calls `keep_house` every `interval_s` seconds until cancelled."""
        while True:
            self.keep_house()
            await asyncio.sleep(interval_s)

    def keep_house(self) -> None:
        """Applies the changes that are due by time alone (expired leases and placements, roles) and updates gauges."""
        self._handle(Tick())
        self._kept_house_at = self._clock()
        self._gauge()

    def _ask(self, event: Event, expected: type[R]) -> R:
        """Returns the reply to `event`. Raises the error of a refusal."""
        reply = self._handle(event)[-1]
        if isinstance(reply, Refused):
            raise reply.error
        if not isinstance(reply, expected):
            raise AssertionError(f"{reply} does not answer {event}")
        return reply

    def _handle(self, event: Event, request_id: str = "") -> list[Action]:
        """Applies an event to the state and logs and counts its actions. `request_id`: the request it concerns."""
        now = self._clock()
        if now - self._kept_house_at > self._away_after_s:
            self._back(now)
        actions = self._state.handle(event, now)
        for action in actions:
            self._observe(action, request_id)
        return actions

    def _back(self, now: float) -> None:
        """Excuses all instances for the suspension. Their messages from that time are still unread, so they must not
        count as silent."""
        away_s, self._kept_house_at = now - self._kept_house_at, now
        log.warning("stood still for %.1f s; nobody counts as silent for that time", away_s)
        self._state.handle(Away(seconds=away_s), now)

    def _observe(self, action: Action, request_id: str) -> None:
        match action:
            case Placed():
                self._metrics.placements.inc()
                _log_placement(action.placement)
            case Rejected():
                self._metrics.rejections.labels(action.reason).inc()
                if log.isEnabledFor(logging.DEBUG):
                    text = "rejected: %s; it may come back in %.1f s"
                    log.debug(text, action.reason, action.retry_after_s, extra=of(request_id))
            case Refused():
                whose = of(request_id) if request_id else None
                log.info("refused: %s", action.error.message, extra=whose)
            case TtftObserved():
                self._metrics.ttft_error_s.observe(action.predicted_s - action.actual_s)
            case InstanceJoined():
                log.info("%s %s joined", action.role, action.instance_id)
            case InstanceRemoved():
                log.warning("%s %s removed: %s", action.role, action.instance_id, action.reason)
            case RoleChangeDue():
                log.info("%s should become a %s worker", action.endpoint.instance_id, action.role)
                if self._role_commands is not None:
                    self._role_commands.send(action)
            case PlacementForgotten():
                whose = of(action.request_id)
                log.warning("nobody reported the end of %s", action.request_id, extra=whose)

    def _gauge(self) -> None:
        view = self._state.cluster(self._clock())
        for role in Role:
            count = sum(instance.role is role for instance in view.instances)
            self._metrics.instances.labels(role.value).set(count)
        for term, accuracy in view.ttft_accuracy.items():
            for quantile, error in (("0.5", accuracy.p50), ("0.9", accuracy.p90)):
                self._metrics.ttft_error_ratio.labels(term.value, quantile).set(error)
        self._metrics.indexed_blocks.set(sum(i.indexed_blocks for i in view.instances))


def _log_placement(placement: Placement) -> None:
    if log.isEnabledFor(logging.DEBUG):
        text = "placed: %s, then %s; first token predicted in %.3f s"
        named = (placement.prefill.instance_id, placement.decode.instance_id)
        log.debug(text, *named, placement.predicted_ttft_s, extra=of(placement.request_id))


async def serve(config: ConductorConfig, lifecycle: Lifecycle) -> None:
    """Runs the conductor until the process is asked to stop. Raises ConfigError if it cannot start."""
    registry = process_registry()
    metrics = SchedulerMetrics(registry)
    _begin(metrics, config)
    config.policy()  # report invalid options before anything is served
    config.roles()
    commands = RoleCommands(Channels(config.cluster_token, config.tls()))

    def fresh() -> ConductorService:
        state = ConductorState(config.policy(), config.limits(), config.roles())
        return ConductorService(
            state,
            metrics,
            role_commands=commands,
            tracer=tracer,
            away_after_s=config.lease_s / 2,
        )

    with (
        seldom_collected(),
        exposed(registry, config.host, config.metrics_port),
        tracing(config, config.instance_id, "conductor") as tracer,
    ):
        try:
            if config.registry is None:
                await _serve_alone(config, lifecycle, fresh(), registry)
            else:
                await serve_among_others(config, config.registry, lifecycle, fresh, registry)
        finally:
            await commands.close()


def _begin(metrics: SchedulerMetrics, config: ConductorConfig) -> None:
    """Sets the constant metrics, and creates a zero counter per rejection reason so that its rate is 0, not missing."""
    for objective, seconds in (("ttft", config.ttft_slo), ("tbt", config.tbt_slo)):
        metrics.objectives.labels(objective).set(seconds)
    for reason in REASONS:
        metrics.rejections.labels(reason)


async def _serve_alone(
    config: ConductorConfig,
    lifecycle: Lifecycle,
    service: ConductorService,
    registry: CollectorRegistry,
) -> None:
    # Clients that were given several conductor addresses ask each one which conductor leads.
    async with (
        serving(config, service, SoleLeadership(), registry) as address,
        running(service.housekeep(config.heartbeat_interval_s / 2)) as task,
    ):
        lifecycle.ready(rpc=address)
        await lifecycle.until_stopped(task)
