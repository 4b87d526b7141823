"""The conductor's gRPC service: the only part that awaits, reads the clock, logs and updates metrics.

Every call becomes one event for `ConductorState` and is answered from the resulting actions, without awaiting in
between. A housekeeping task sends ticks, so that silent instances are noticed even when no calls arrive.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from moonserve.conductor import wire
from moonserve.conductor.config import ConductorConfig
from moonserve.conductor.events import (
    Action,
    Deregister,
    Deregistered,
    Event,
    HeartbeatSeen,
    InstanceJoined,
    InstanceRemoved,
    Placed,
    PlacementForgotten,
    Redirected,
    Refused,
    Registered,
    Rejected,
    RemovalReason,
    Reported,
    RoleChangeDue,
    Suspended,
    Tick,
    TtftObserved,
)
from moonserve.conductor.peers.leader_election_service import serve_replicated
from moonserve.conductor.peers.shard_service import serve_active
from moonserve.conductor.peers.shard_state import ShardState
from moonserve.conductor.placement.admission import REASONS
from moonserve.conductor.state import ConductorState
from moonserve.conductor.wire import RecentGateways
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, worker_pb2, worker_pb2_grpc
from moonserve.protocol.process.event_loop import BackgroundTasks
from moonserve.protocol.process.lifecycle import Lifecycle, infrequent_gc
from moonserve.protocol.process.logs import request_extra
from moonserve.protocol.process.metrics import http_endpoint, process_registry
from moonserve.protocol.process.tracing import Tracer, tracing
from moonserve.protocol.request import Role
from moonserve.protocol.rpc.grpc_transport import Channels, Context
from moonserve.protocol.rpc.wire import failure_to_wire, from_message, role_to_wire, to_message

log = logging.getLogger(__name__)

R = TypeVar("R")

_ROLE_TIMEOUT_S = 5.0
_ERROR_BUCKETS = (
    -30.0, -10.0, -3.0, -1.0, -0.3, -0.1, -0.03, -0.01, 0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0,
)  # fmt: skip


class ConductorMetrics:
    """Placement metrics of the conductor. At most one instance per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.placements = Counter("moonserve_placements", "Requests placed.", registry=registry)
        self.rejections = Counter("moonserve_rejections", "Requests not placed.", ("reason",), registry=registry)
        self.redirections = Counter(
            "moonserve_redirections", "Requests that another active conductor should place.", registry=registry
        )
        self.ttft_error_s = Histogram(
            "moonserve_ttft_prediction_error_seconds",
            "Predicted minus actual time to first token.",
            registry=registry,
            buckets=_ERROR_BUCKETS,
        )
        self.ttft_error_ratio = Gauge(
            "moonserve_conductor_ttft_error_ratio",
            "Size of recent prediction errors as a share of the actual TTFT, of the whole and of its terms.",
            ("term", "quantile"),
            registry=registry,
        )
        self.indexed_blocks = Gauge(
            "moonserve_indexed_blocks", "Block replicas in the prefix index.", registry=registry
        )
        self.objectives = Gauge(
            "moonserve_slo_seconds",
            "What placement must meet where requests do not say.",
            ("objective",),
            registry=registry,
        )
        self.instances = Gauge("moonserve_instances", "Live instances.", ("role",), registry=registry)


class RoleCommands:
    """Sends role changes to workers. Best effort: the role controller repeats a change while it is needed. Owns
    `channels` and closes them."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._tasks = BackgroundTasks()

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
        metrics: ConductorMetrics,
        clock: Callable[[], float] = time.monotonic,
        role_commands: RoleCommands | None = None,
        tracer: Tracer | None = None,
        away_after_s: float = math.inf,
        shard: ShardState | None = None,
    ) -> None:
        """`role_commands`: required if the state changes roles. `away_after_s`: if the last housekeeping is longer ago
        than this, the process or its machine is taken to have been suspended. `shard`: that of `state`."""
        self._state = state
        self._metrics = metrics
        self._clock = clock
        self._role_commands = role_commands
        self._tracer = tracer or Tracer()
        self._shard = shard
        self._shard_summary = conductor_pb2.ShardSummary()
        self._gateways = RecentGateways()
        self._suspended_after_s = away_after_s
        self._ticked_at = math.inf

    async def Register(self, request: conductor_pb2.RegisterRequest, context: Context) -> conductor_pb2.RegisterReply:
        reply = self._call(wire.register_from_wire(request), Registered)
        return conductor_pb2.RegisterReply(heartbeat_interval_s=reply.heartbeat_interval_s, lease_s=reply.lease_s)

    async def Heartbeat(
        self, request: conductor_pb2.HeartbeatRequest, context: Context
    ) -> conductor_pb2.HeartbeatReply:
        reply = self._call(wire.heartbeat_from_wire(request), HeartbeatSeen)
        return conductor_pb2.HeartbeatReply(known=reply.known, resync=reply.resync, move_to=reply.move_to)

    async def Deregister(
        self, request: conductor_pb2.DeregisterRequest, context: Context
    ) -> conductor_pb2.DeregisterReply:
        self._call(from_message(Deregister, request), Deregistered)
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
            case Redirected():
                return conductor_pb2.PlaceReply(elsewhere=reply.address)
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
        self._call(wire.report_from_wire(request), Reported)
        return conductor_pb2.ReportReply()

    async def GetCluster(self, request: conductor_pb2.GetClusterRequest, context: Context) -> conductor_pb2.ClusterView:
        now = self._clock()
        if request.HasField("gateway"):
            self._gateways.record(request.gateway, now)
        reply = wire.cluster_to_wire(self._state.cluster(now))
        reply.gateways.extend(self._gateways.list_recent(now))
        return reply

    async def Explain(self, request: conductor_pb2.ExplainRequest, context: Context) -> conductor_pb2.ExplainReply:
        decision = self._state.explain(request.request_id)
        return conductor_pb2.ExplainReply(
            found=decision is not None,
            decision_json="" if decision is None else decision.to_json(),
            num_decisions=len(self._state.decisions),
            max_decisions=self._state.decisions.capacity,
        )

    async def Exchange(self, request: conductor_pb2.ShardSummary, context: Context) -> conductor_pb2.ShardSummary:
        if request.address:
            self.hear_shard(request)
        return self._shard_summary

    def hear_shard(self, summary: conductor_pb2.ShardSummary) -> None:
        """Records what another active conductor told."""
        if self._shard is not None:
            self._shard.hear(wire.summary_from_wire(summary), self._clock())

    def tick_shard(self) -> conductor_pb2.ShardSummary:
        """Returns what the other active conductors should know, as of now. Requires a shard."""
        self._shard_summary = wire.summary_to_wire(self._state.tick_shard(self._clock()))
        return self._shard_summary

    def tick(self) -> None:
        """Applies the changes that are due by time alone (expired leases and placements, roles) and updates gauges."""
        self._handle(Tick())
        self._ticked_at = self._clock()
        self._gauge()

    def _call(self, event: Event, expected: type[R]) -> R:
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
        if now - self._ticked_at > self._suspended_after_s:
            self._extend_leases(now)
        actions = self._state.handle(event, now)
        for action in actions:
            self._observe(action, request_id)
        return actions

    def _extend_leases(self, now: float) -> None:
        """Excuses all instances for the suspension. Their messages from that time are still unread, so they must not
        count as silent."""
        away_s, self._ticked_at = now - self._ticked_at, now
        log.warning("the process was suspended for %.1f s; all leases are extended by that time", away_s)
        self._state.handle(Suspended(seconds=away_s), now)

    def _observe(self, action: Action, request_id: str) -> None:
        match action:
            case Placed():
                self._metrics.placements.inc()
                if log.isEnabledFor(logging.DEBUG):
                    placed = action.placement
                    text = "placed: %s, then %s; first token predicted in %.3f s"
                    named = (placed.prefill.instance_id, placed.decode.instance_id)
                    log.debug(text, *named, placed.predicted_ttft_s, extra=request_extra(placed.request_id))
            case Rejected():
                self._metrics.rejections.labels(action.reason).inc()
                if log.isEnabledFor(logging.DEBUG):
                    text = "rejected: %s; it may come back in %.1f s"
                    log.debug(text, action.reason, action.retry_after_s, extra=request_extra(request_id))
            case Refused():
                whose = request_extra(request_id) if request_id else None
                log.info("request rejected: %s", action.error.message, extra=whose)
            case TtftObserved():
                self._metrics.ttft_error_s.observe(action.predicted_s - action.actual_s)
            case InstanceJoined():
                log.info("%s %s joined", action.role, action.instance_id)
            case Redirected():
                self._metrics.redirections.inc()
                log.debug("to be placed by %s", action.address, extra=request_extra(request_id))
            case InstanceRemoved(reason=RemovalReason.MOVED):
                log.info("%s %s is sent to another conductor", action.role, action.instance_id)
            case InstanceRemoved():
                log.warning("%s %s removed: %s", action.role, action.instance_id, action.reason)
            case RoleChangeDue():
                log.info("%s should become a %s worker", action.endpoint.instance_id, action.role)
                if self._role_commands is not None:
                    self._role_commands.send(action)
            case PlacementForgotten():
                whose = request_extra(action.request_id)
                log.warning(
                    "the end of %s was never reported; its placement is dropped", action.request_id, extra=whose
                )

    def _gauge(self) -> None:
        view = self._state.cluster(self._clock())
        for role in Role:
            count = sum(instance.role is role for instance in view.instances)
            self._metrics.instances.labels(role.value).set(count)
        for term, accuracy in view.ttft_accuracy.items():
            for quantile, error in (("0.5", accuracy.p50), ("0.9", accuracy.p90)):
                self._metrics.ttft_error_ratio.labels(term.value, quantile).set(error)
        self._metrics.indexed_blocks.set(sum(i.indexed_blocks for i in view.instances))


async def serve(config: ConductorConfig, lifecycle: Lifecycle) -> None:
    """Runs the conductor until the process is asked to stop. Raises ConfigError if it cannot start."""
    registry = process_registry()
    metrics = ConductorMetrics(registry)
    _init_metrics(metrics, config)
    config.policy()  # report invalid options before anything is served
    config.role_controller()
    commands = RoleCommands(Channels(config.cluster_token, config.tls()))

    def fresh(shard: ShardState | None = None) -> ConductorService:
        state = ConductorState(config.policy(), config.limits(), config.role_controller(), shard)
        return ConductorService(
            state,
            metrics,
            role_commands=commands,
            tracer=tracer,
            away_after_s=config.lease_s / 2,
            shard=shard,
        )

    with (
        infrequent_gc(),
        http_endpoint(registry, config.host, config.metrics_port),
        tracing(config, config.instance_id, "conductor") as tracer,
    ):
        try:
            if config.registry is not None and config.shards is None:
                await serve_replicated(config, config.registry, lifecycle, fresh, registry)
            else:
                shard = None if config.shards is None else ShardState(config.own_shard())
                await serve_active(config, lifecycle, fresh(shard), registry)
        finally:
            await commands.close()


def _init_metrics(metrics: ConductorMetrics, config: ConductorConfig) -> None:
    """Sets the constant metrics, and creates a zero counter per rejection reason so that its rate is 0, not missing."""
    for objective, seconds in (("ttft", config.ttft_slo), ("tbt", config.tbt_slo)):
        metrics.objectives.labels(objective).set(seconds)
    for reason in REASONS:
        metrics.rejections.labels(reason)
