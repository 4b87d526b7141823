"""Leader election among conductors: the registry requests of `LeaderElectionState`, and serving only while this
conductor leads.

The claim is a registry member that all candidates try to join as. Its id is the same for all, its owner is new at
every start, and its endpoint is the leader's address. A request times out when the next one would be due.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from moonserve.conductor.config import ConductorConfig
from moonserve.conductor.peers.leader_election_state import (
    Answer,
    BeginLeading,
    Claim,
    Claimed,
    ClaimRefused,
    ClaimTerms,
    Event,
    LeaderElectionState,
    Lost,
    RegistrySilent,
    Renew,
    Renewed,
    StepDown,
    Tick,
)
from moonserve.protocol.errors import (
    Incompatible,
    InvalidRequest,
    MoonserveError,
    NotLeader,
    NoWorker,
    StaleLease,
    Unauthenticated,
)
from moonserve.protocol.membership.heartbeats import own_endpoint
from moonserve.protocol.membership.registry import Member, Registry
from moonserve.protocol.membership.registry.client import connect_registry
from moonserve.protocol.pb import conductor_pb2, conductor_pb2_grpc, leadership_pb2, leadership_pb2_grpc
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.process.metrics import add_metrics_service
from moonserve.protocol.rpc.grpc_transport import Context, RpcServer

log = logging.getLogger(__name__)

CLAIM_ID = "conductor-leader"
ROLE = "conductor"
LEAVE_TIMEOUT_S = 0.5


def boot_clock() -> float:
    """Returns seconds since boot, including suspend, because a claim also expires while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Candidate:
    """One candidate. Calls `begin(epoch)` and `step_down(reason)` in the event loop."""

    def __init__(
        self,
        registry: Registry,
        address: str,
        terms: ClaimTerms,
        *,
        begin: Callable[[int], None],
        step_down: Callable[[str], None],
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self.address = address
        self._state = LeaderElectionState(terms, due_at=clock())
        self._registry = registry
        self._begin = begin
        self._step_down = step_down
        self._clock = clock
        # The registry assigns the epoch, above 0.
        endpoint = own_endpoint(CLAIM_ID, rpc_address=address, transfer_address="")
        self._member = Member(
            endpoint=dataclasses.replace(endpoint, epoch=0),
            role=ROLE,
            owner=secrets.token_hex(8),
        )
        self._request: asyncio.Task[Answer] | None = None
        self._was_heard = False  # the registry has answered at least once
        self._is_silent = False  # the registry did not answer the last request
        self._has_ended = False

    @property
    def leads(self) -> bool:
        """True if this candidate leads now, by its own clock."""
        return not self._has_ended and self._state.leads(self._clock())

    @property
    def epoch(self) -> int:
        """The highest epoch seen; while this candidate leads, that of its claim."""
        return self._state.known_epoch

    @property
    def other_address(self) -> str | None:
        """Address of another conductor that leads; None = unknown."""
        return self._state.leader_address

    async def run(self) -> None:
        """Runs until cancelled, then gives up the claim.

        Raises Unauthenticated, InvalidRequest or Incompatible if that is the registry's first answer, since a retry
        cannot help then.
        """
        try:
            while True:
                self._apply(Tick())
                delay_s = max(0.0, self._state.due_at - self._clock())
                if self._request is None:
                    await asyncio.sleep(delay_s)
                    continue
                await asyncio.wait({self._request}, timeout=delay_s)
                if self._request.done():
                    answer, self._request = self._request.result(), None
                    self._apply(answer)
        finally:
            await self._end()

    def _apply(self, event: Event) -> None:
        for action in self._state.handle(event, self._clock()):
            match action:
                case Claim():
                    self._start_request(self._claim(action.known_epoch))
                case Renew():
                    self._start_request(self._renew(action.epoch))
                case BeginLeading():
                    log.info("this conductor leads, epoch %d", action.epoch)
                    self._begin(action.epoch)
                case StepDown():
                    log.warning("this conductor no longer leads, epoch %d: %s", action.epoch, action.reason)
                    self._step_down(action.reason)

    def _start_request(self, question: Coroutine[Any, Any, Answer]) -> None:
        assert self._request is None, "one question at a time"
        self._request = asyncio.create_task(self._answered(question))

    async def _answered(self, question: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            async with asyncio.timeout(self._state.terms.renew_every_s):
                answer = await question
        except (Unauthenticated, InvalidRequest, Incompatible) as error:
            if not self._was_heard:
                raise
            return self._silence(error.message)
        except MoonserveError as error:
            return self._silence(error.message)
        except TimeoutError:
            return self._silence("no answer in time")
        if self._is_silent:
            log.info("the registry can be used again")
        self._was_heard, self._is_silent = True, False
        return answer

    def _silence(self, reason: str) -> RegistrySilent:
        if not self._is_silent:
            log.warning("the registry cannot be used: %s", reason)
        self._is_silent = True
        return RegistrySilent(reason=reason)

    async def _claim(self, known_epoch: int) -> Answer:
        try:
            joined = await self._registry.join(self._with_epoch(known_epoch), ttl_s=self._state.terms.ttl_s)
        except StaleLease as error:
            return await self._refused(error.retry_after_s or 0.0)
        return Claimed(epoch=joined.endpoint.epoch)

    async def _refused(self, retry_after_s: float) -> ClaimRefused:
        """Returns a refusal with the leader's address, which this candidate's callers are given."""
        with contextlib.suppress(MoonserveError):
            for member in await self._registry.members():
                if member.instance_id == CLAIM_ID:
                    return ClaimRefused(
                        retry_after_s=retry_after_s,
                        leader_address=member.endpoint.rpc_address,
                        epoch=member.endpoint.epoch,
                    )
        return ClaimRefused(retry_after_s=retry_after_s, leader_address=None, epoch=0)

    async def _renew(self, epoch: int) -> Answer:
        try:
            await self._registry.renew(self._with_epoch(epoch), ttl_s=self._state.terms.ttl_s)
        except StaleLease as error:
            return Lost(reason=error.message)
        return Renewed()

    def _with_epoch(self, epoch: int) -> Member:
        endpoint = dataclasses.replace(self._member.endpoint, epoch=epoch)
        return dataclasses.replace(self._member, endpoint=endpoint)

    async def _end(self) -> None:
        """Stops leading, then gives up the claim. No registry request is in flight afterwards."""
        self._has_ended = True
        if self._request is not None:
            self._request.cancel()
            await asyncio.wait({self._request})
        with contextlib.suppress(MoonserveError, TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._registry.leave(self._with_epoch(self._state.epoch))


# Serving with several conductors: the leader answers calls, the others name the leader.
#
# Leadership is checked before and after each call, by the clock and not by a timer, so that a suspended process
# refuses calls when it resumes. Each leadership begins with an empty state: instances register again within a
# heartbeat and report their blocks. Until the lease of silent instances would have expired, a reply that depends on
# missing instances is refused and the client has to retry. Knows the calls only from conductor.proto.

# Calls in flight when the process stops are answered within milliseconds.
STOP_GRACE_S = 0.5


_METHODS = frozenset(method.name for method in conductor_pb2.DESCRIPTOR.services_by_name["Conductor"].methods)


class Service(Protocol):
    """Interface of `ConductorService`, which also has the methods of conductor.proto."""

    def tick(self) -> None: ...


class LeaderMetrics:
    """Metrics of leadership. Must be created once per metrics registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.leads = Gauge("moonserve_conductor_leads", "1 where this conductor leads.", registry=registry)
        self.terms = Counter(
            "moonserve_conductor_terms",
            "Times that this conductor began to lead.",
            registry=registry,
        )


class LeaderOnlyService(leadership_pb2_grpc.LeadershipServicer):
    """Implements the Conductor service while its candidate leads, and tells clients which conductor does. `fresh` makes
    an empty conductor; `gather_s` is how long a new leader waits for instances before it replies that some are
    missing."""

    def __init__(self, fresh: Callable[[], Service], gather_s: float, metrics: LeaderMetrics) -> None:
        self.candidate: Candidate | None = None  # set once the address is known
        self._make_service = fresh
        self._gather_s = gather_s
        self._metrics = metrics
        self._service: Service | None = None  # set while this conductor leads
        self._began_at = 0.0  # time at which `_service` was created

    def __getattr__(self, name: str) -> Callable[[Any, Context], Awaitable[Any]]:
        if name not in _METHODS:
            raise AttributeError(name)
        return functools.partial(self._answer, name)

    def begin(self, epoch: int) -> None:
        self._service, self._began_at = self._make_service(), time.monotonic()
        self._metrics.leads.set(1)
        self._metrics.terms.inc()

    def step_down(self, reason: str) -> None:
        self._service = None
        self._metrics.leads.set(0)

    def tick(self) -> None:
        if self._service is not None:
            self._service.tick()

    async def Who(self, request: leadership_pb2.WhoRequest, context: Context) -> leadership_pb2.WhoReply:
        candidate = self.candidate
        if candidate is None:
            return leadership_pb2.WhoReply()
        return leadership_pb2.WhoReply(
            leads=candidate.leads,
            epoch=candidate.epoch,
            leader_address=candidate.other_address or "",
        )

    async def _answer(self, name: str, request: Any, context: Context) -> Any:
        service = self._leading()
        reply = await getattr(service, name)(request, context)
        if self._leading() is not service:
            raise NotLeader("this conductor has just lost the leadership")
        if time.monotonic() < self._began_at + self._gather_s and depends_on_missing_instances(reply):
            raise NotLeader("this conductor has just become the leader and does not know the cluster yet")
        return reply

    def _leading(self) -> Service:
        """Returns the service while this conductor leads. Else raises NotLeader, with the leader's address if known."""
        candidate = self.candidate
        if candidate is not None and candidate.leads and self._service is not None:
            return self._service
        other = candidate.other_address if candidate is not None else None
        if other is None:
            raise NotLeader("this conductor does not lead and knows no leader")
        raise NotLeader("this conductor does not lead", leader=other)


def depends_on_missing_instances(reply: Any) -> bool:
    """Returns True if a reply could differ if more instances were known."""
    match reply:
        case conductor_pb2.PlaceReply():
            lacking = reply.failure.code == NoWorker.code
            return bool(lacking or reply.WhichOneof("outcome") == "overloaded")
        case conductor_pb2.ClusterView():
            return not reply.ready
    return False


async def tick_periodically(service: Service, interval_s: float) -> None:
    """Calls the service's `tick` every `interval_s` seconds until cancelled."""
    while True:
        service.tick()
        await asyncio.sleep(interval_s)


class SoleLeadership(leadership_pb2_grpc.LeadershipServicer):
    """Tells clients that this conductor leads; for a cluster without a registry. The epoch is its start time."""

    def __init__(self, is_shard: bool = False) -> None:
        self._epoch = time.time_ns()
        self._is_shard = is_shard

    async def Who(self, request: leadership_pb2.WhoRequest, context: Context) -> leadership_pb2.WhoReply:
        return leadership_pb2.WhoReply(leads=True, epoch=self._epoch, is_shard=self._is_shard)


def serving_calls(
    config: ConductorConfig,
    conductor: Any,
    leadership: leadership_pb2_grpc.LeadershipServicer,
    metrics: CollectorRegistry,
) -> AbstractAsyncContextManager[str]:
    """Serves calls while the block runs; yields the address. `conductor` has the methods of conductor.proto."""
    server = RpcServer(config.cluster_token, config.tls())
    conductor_pb2_grpc.add_ConductorServicer_to_server(conductor, server.grpc)
    server.add_socket_service("Conductor", conductor)
    leadership_pb2_grpc.add_LeadershipServicer_to_server(leadership, server.grpc)
    add_metrics_service(server.grpc, config.instance_id, metrics)
    return server.serving(config.host, config.port, STOP_GRACE_S)


async def serve_replicated(
    config: ConductorConfig,
    registry_url: str,
    lifecycle: Lifecycle,
    fresh: Callable[[], Service],
    metrics: CollectorRegistry,
) -> None:
    """Runs one of several conductors until the process is asked to stop. Raises ConfigError if it cannot start."""
    terms = config.claim_terms()
    registry = connect_registry(registry_url, cluster_token=config.cluster_token, tls=config.tls())
    led = LeaderOnlyService(fresh, config.limits().lease_s, LeaderMetrics(metrics))
    try:
        async with serving_calls(config, led, led, metrics) as address:
            led.candidate = candidate = Candidate(registry, address, terms, begin=led.begin, step_down=led.step_down)
            async with (
                background_task(tick_periodically(led, config.heartbeat_interval_s / 2)) as ticking,
                background_task(candidate.run()) as standing,
            ):
                lifecycle.ready(rpc=address)
                await lifecycle.wait_for_stop(ticking, standing)
    finally:
        await registry.close()
