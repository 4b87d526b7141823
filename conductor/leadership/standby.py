"""Serving with several conductors: the leader answers calls, the others name the leader.

Rules: leadership is checked before and after each call, by the clock and not by a timer, so that a suspended process
refuses calls when it resumes. Each leadership begins with an empty state: instances register again within a heartbeat
and report their blocks. Until the lease of silent instances would have expired, a reply that depends on missing
instances is refused and the client has to retry. Knows the calls only from conductor.proto.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc.aio
from prometheus_client import CollectorRegistry, Counter, Gauge

from conductor.config import ConductorConfig
from conductor.leadership.candidate import Candidate
from protocol.errors import NotLeader, NoWorker
from protocol.pb import conductor_pb2, conductor_pb2_grpc, leadership_pb2, leadership_pb2_grpc
from protocol.process import Lifecycle, running
from protocol.registry.connect import connect
from protocol.rpc import RpcServer
from protocol.scraping import serve_metrics

log = logging.getLogger(__name__)

# Calls in flight when the process stops are answered within milliseconds.
STOP_GRACE_S = 0.5

Context = grpc.aio.ServicerContext[Any, Any]

_METHODS = frozenset(method.name for method in conductor_pb2.DESCRIPTOR.services_by_name["Conductor"].methods)


class Service(Protocol):
    """Interface of `ConductorService`, which also has the methods of conductor.proto."""

    def keep_house(self) -> None: ...


class LeaderMetrics:
    """Metrics of leadership. Must be created once per metrics registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.leads = Gauge("moonserve_conductor_leads", "1 where this conductor leads.", registry=registry)
        self.terms = Counter(
            "moonserve_conductor_terms",
            "Times that this conductor began to lead.",
            registry=registry,
        )


class Led:
    """Implements the Conductor service while its candidate leads. `fresh` makes an empty conductor; `gather_s` is how
    long a new leader waits for instances before it replies that some are missing."""

    def __init__(
        self,
        fresh: Callable[[], Service],
        gather_s: float,
        metrics: LeaderMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.candidate: Candidate | None = None  # set once the address is known
        self._fresh = fresh
        self._gather_s = gather_s
        self._metrics = metrics
        self._clock = clock
        self._service: Service | None = None  # set while this conductor leads
        self._began_at = 0.0  # time at which `_service` was created

    def __getattr__(self, name: str) -> Callable[[Any, Context], Awaitable[Any]]:
        if name not in _METHODS:
            raise AttributeError(name)
        return functools.partial(self._answer, name)

    def begin(self, epoch: int) -> None:
        self._service, self._began_at = self._fresh(), self._clock()
        self._metrics.leads.set(1)
        self._metrics.terms.inc()

    def step_down(self, reason: str) -> None:
        self._service = None
        self._metrics.leads.set(0)

    async def housekeep(self, interval_s: float) -> None:
        """Calls the leading service's `keep_house` every `interval_s` seconds until cancelled."""
        while True:
            if self._service is not None:
                self._service.keep_house()
            await asyncio.sleep(interval_s)

    async def _answer(self, name: str, request: Any, context: Context) -> Any:
        service = self._leading()
        reply = await getattr(service, name)(request, context)
        if self._leading() is not service:
            raise NotLeader("this conductor led until just now")
        if self._clock() < self._began_at + self._gather_s and tells_of_nobody(reply):
            raise NotLeader("this conductor leads since just now and does not know the cluster yet")
        return reply

    def _leading(self) -> Service:
        """Returns the service while this conductor leads. Else raises NotLeader, with the leader's address if known."""
        candidate = self.candidate
        if candidate is not None and candidate.leads and self._service is not None:
            return self._service
        other = candidate.other_address if candidate is not None else None
        if other is None:
            raise NotLeader("this conductor does not lead, and knows of none that does")
        raise NotLeader("this conductor does not lead", leader=other)


def tells_of_nobody(reply: Any) -> bool:
    """Returns True if a reply could differ if more instances were known."""
    match reply:
        case conductor_pb2.PlaceReply():
            lacking = reply.failure.code == NoWorker.code
            return bool(lacking or reply.WhichOneof("outcome") == "overloaded")
        case conductor_pb2.ClusterView():
            return not reply.ready
    return False


class LeadershipService(leadership_pb2_grpc.LeadershipServicer):
    """Tells clients which conductor leads."""

    def __init__(self, led: Led) -> None:
        self._led = led

    async def Who(self, request: leadership_pb2.WhoRequest, context: Context) -> leadership_pb2.WhoReply:
        candidate = self._led.candidate
        if candidate is None:
            return leadership_pb2.WhoReply()
        return leadership_pb2.WhoReply(
            leads=candidate.leads,
            epoch=candidate.epoch,
            leader_address=candidate.other_address or "",
        )


class SoleLeadership(leadership_pb2_grpc.LeadershipServicer):
    """Tells clients that this conductor leads; for a cluster without a registry. The epoch is its start time."""

    def __init__(self) -> None:
        self._epoch = time.time_ns()

    async def Who(self, request: leadership_pb2.WhoRequest, context: Context) -> leadership_pb2.WhoReply:
        return leadership_pb2.WhoReply(leads=True, epoch=self._epoch)


@contextlib.asynccontextmanager
async def serving(
    config: ConductorConfig,
    conductor: Any,
    leadership: leadership_pb2_grpc.LeadershipServicer,
    metrics: CollectorRegistry,
) -> AsyncIterator[str]:
    """Serves calls while the block runs; yields the address. `conductor` has the methods of conductor.proto."""
    server = RpcServer(config.cluster_token, config.tls())
    conductor_pb2_grpc.add_ConductorServicer_to_server(conductor, server.grpc)
    server.add_lean("Conductor", conductor)
    leadership_pb2_grpc.add_LeadershipServicer_to_server(leadership, server.grpc)
    serve_metrics(server.grpc, config.instance_id, metrics)
    address = await server.start(config.host, config.port)
    try:
        yield address
    finally:
        await server.stop(STOP_GRACE_S)


async def serve_among_others(
    config: ConductorConfig,
    registry_url: str,
    lifecycle: Lifecycle,
    fresh: Callable[[], Service],
    metrics: CollectorRegistry,
) -> None:
    """Runs one of several conductors until the process is asked to stop. Raises ConfigError if it cannot start."""
    terms = config.terms()
    registry = connect(registry_url, cluster_token=config.cluster_token, tls=config.tls())
    led = Led(fresh, config.limits().lease_s, LeaderMetrics(metrics))
    try:
        async with serving(config, led, LeadershipService(led), metrics) as address:
            led.candidate = candidate = Candidate(registry, address, terms, begin=led.begin, step_down=led.step_down)
            async with (
                running(led.housekeep(config.heartbeat_interval_s / 2)) as keeping,
                running(candidate.run()) as standing,
            ):
                lifecycle.ready(rpc=address)
                await lifecycle.until_stopped(keeping, standing)
    finally:
        await registry.close()
