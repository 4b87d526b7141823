"""Tests of single and standby conductors over a real registry and real sockets, in one event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from moonserve.conductor.config import ConductorConfig
from moonserve.conductor.peers.leader_election_service import Candidate, LeaderMetrics, LeaderOnlyService, boot_clock
from moonserve.conductor.peers.leader_election_state import ClaimTerms
from moonserve.conductor.placement.policies import PUBLISHED_POLICY
from moonserve.conductor.service import serve
from moonserve.deploy.launcher.ports import free_port
from moonserve.protocol.errors import ConfigError, NotLeader, NoWorker, Unauthenticated
from moonserve.protocol.membership.conductor_client import ConductorClient
from moonserve.protocol.membership.registry.embedded import EmbeddedRegistry
from moonserve.protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, leadership_pb2, leadership_pb2_grpc
from moonserve.protocol.process.config import load_config
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.protocol.rpc.wire import failure_from_wire
from tests.conductor.cluster import chain
from tests.conductor.test_service import living, registration, wish
from tests.patience import PATIENCE_S, answered
from tests.protocol.membership.conftest import served
from tests.services import ReportedLifecycle, serving

TOKEN = "secret"


class Cluster:
    """Named conductors, their shared registry, and clients of all of them."""

    def __init__(self, registry: str | None = None) -> None:
        self._registry = registry
        self._running: dict[str, contextlib.AsyncExitStack] = {}
        self.addresses: dict[str, str] = {}
        self.channels = Channels(TOKEN)

    async def start(self, name: str, **options: float) -> None:
        """Starts a conductor and waits for its address. `options` sets fields of its configuration."""
        common = {"leader_ttl_s": 3.0, "heartbeat_interval_s": 0.1}
        config = ConductorConfig(cluster_token=TOKEN, registry=self._registry, **common | options)
        running = self._running[name] = contextlib.AsyncExitStack()
        self.addresses[name] = (await running.enter_async_context(serving(serve, config)))["rpc"]

    async def stop(self, name: str) -> None:
        await self._running.pop(name).aclose()

    async def who(self, name: str) -> leadership_pb2.WhoReply:
        stub: leadership_pb2_grpc.LeadershipAsyncStub = leadership_pb2_grpc.LeadershipStub(
            self.channels.to(self.addresses[name])
        )
        request = leadership_pb2.WhoRequest()
        return await self.channels.call(stub.Who, request, timeout_s=PATIENCE_S)

    async def until(self, name: str, condition: Callable[[leadership_pb2.WhoReply], bool]) -> None:
        await answered(lambda: self.who(name), condition)

    def clients(self) -> ConductorClient:
        return ConductorClient(self.channels, ",".join(self.addresses.values()))

    async def ask(self, name: str, method: str, request: Any) -> Any:
        """Calls this conductor only, without following the leader."""
        stub = conductor_pb2_grpc.ConductorStub(self.channels.to(self.addresses[name]))
        return await self.channels.call(getattr(stub, method), request, timeout_s=PATIENCE_S)

    async def close(self) -> None:
        for name in list(self._running):
            await self.stop(name)
        await self.channels.close()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with served() as registry:
        cluster = Cluster(registry)
        try:
            yield cluster
        finally:
            await cluster.close()


@pytest.fixture
async def pair(cluster: Cluster) -> Cluster:
    """`a` leads and `b` stands by."""
    await cluster.start("a")
    await cluster.until("a", lambda reply: reply.leads)
    await cluster.start("b")
    await cluster.until("b", lambda reply: bool(reply.leader_address))
    return cluster


async def call(conductors: ConductorClient, method: str, request: Any) -> Any:
    return await conductors.call(lambda c: getattr(c, method), request, timeout_s=PATIENCE_S)


async def test_a_standby_refuses_every_call_and_names_the_leader(pair: Cluster) -> None:
    for method, request in [
        ("Register", registration("p0", common_pb2.ROLE_PREFILL)),
        ("Place", wish("r0")),
        ("GetCluster", conductor_pb2.GetClusterRequest()),
        ("Explain", conductor_pb2.ExplainRequest(request_id="r0")),
    ]:
        with pytest.raises(NotLeader) as caught:
            await pair.ask("b", method, request)
        assert caught.value.ids == {"leader": pair.addresses["a"]}


async def test_the_next_leader_learns_members_and_blocks_from_them(pair: Cluster) -> None:
    there = (pair.channels, ",".join(pair.addresses.values()))
    async with (
        living(*there, "p0", common_pb2.ROLE_PREFILL),
        living(*there, "d0", common_pb2.ROLE_DECODE),
        living(*there, "s0", common_pb2.ROLE_STORE),
    ):
        conductors = pair.clients()
        await call(conductors, "Place", wish("r0"))
        epoch = (await pair.who("a")).epoch
        await pair.stop("a")
        placed = await call(conductors, "Place", wish("r1", keys=chain("a", 10)))
        assert placed.placement.prefill.instance_id == "p0"
        reply = await pair.who("b")
        assert reply.leads
        assert reply.epoch > epoch
        ended = conductor_pb2.ReportRequest(request_id="r0", phase=conductor_pb2.ReportRequest.PHASE_FINISHED)
        await call(conductors, "Report", ended)  # of the former leader's placement
        await answered(
            lambda: call(conductors, "GetCluster", conductor_pb2.GetClusterRequest()),
            lambda view: {i.endpoint.instance_id: i.indexed_blocks for i in view.instances}.get("s0") == 9,
        )


async def test_new_leader_reports_missing_workers_only_after_a_lease(cluster: Cluster) -> None:
    await cluster.start("a", lease_s=4.0)
    await cluster.until("a", lambda reply: reply.leads)
    with pytest.raises(NotLeader, match="just become the leader"):
        await cluster.ask("a", "Place", wish("r0"))

    async def place_unless_young() -> Any:
        with contextlib.suppress(NotLeader):
            return await cluster.ask("a", "Place", wish("r0"))

    reply = await answered(place_unless_young)
    assert isinstance(failure_from_wire(reply.failure), NoWorker)


async def test_a_registry_that_refuses_the_credentials_ends_the_start(cluster: Cluster) -> None:
    config = ConductorConfig(cluster_token="another", registry=cluster._registry)
    with pytest.raises(Unauthenticated):
        await serve(config, ReportedLifecycle())


async def test_conductor_without_registry_ticks_and_is_found_at_one_of_several_addresses() -> None:
    alone = Cluster()
    await alone.start("a", lease_s=0.2, heartbeat_interval_s=0.02)
    alone.addresses["nobody"] = f"127.0.0.1:{free_port()}"
    reply = await call(alone.clients(), "Register", registration("p0", common_pb2.ROLE_PREFILL))
    assert reply.lease_s == pytest.approx(0.2)
    request = conductor_pb2.GetClusterRequest()
    await answered(lambda: call(alone.clients(), "GetCluster", request), lambda view: not view.instances)
    async with asyncio.timeout(PATIENCE_S):
        await alone.close()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        *((f"--registry 127.0.0.1:1 --leader-ttl-s {ttl}", "leader-ttl-s") for ttl in ("0", "0.1", "nan", "100000")),
        ("--port 1 --host 0.0.0.0", "cannot dial"),
        ("--heartbeat-interval-s 5 --lease-s 2", "shorter than --lease-s"),
        ("--ttft-slo 0", "must be positive"),
        (f"--placement-policy {PUBLISHED_POLICY} --balancing-threshold 0.5", "at least 1"),
        ("--decision-mib 0", "must be positive"),
        ("--placement-policy nonsense", "is not one of"),
        ("--placement-policy nowhere.py:Nothing", "cannot be created"),
    ],
)
async def test_values_that_cannot_work_are_config_errors(flags: str, named: str) -> None:
    config = load_config(ConductorConfig, flags.split(), prog="conductor", environ={})
    with pytest.raises(ConfigError, match=named):
        await serve(config, ReportedLifecycle())


async def test_answer_from_before_a_suspension_is_not_given() -> None:
    """A leader that sleeps past its lease during a call answers NotLeader. On shutdown it gives its claim up."""
    slept_s, began, registry = 0.0, asyncio.Event(), EmbeddedRegistry()

    async def sleep_long(request: Any, context: Any) -> conductor_pb2.PlaceReply:
        nonlocal slept_s
        slept_s += 60.0
        return conductor_pb2.PlaceReply()

    service, metrics = SimpleNamespace(tick=lambda: None, Place=sleep_long), CollectorRegistry()
    led = LeaderOnlyService(lambda: service, 0.0, LeaderMetrics(metrics))  # type: ignore[arg-type, return-value]

    def begin(epoch: int) -> None:
        led.begin(epoch)
        began.set()

    calls = {"begin": begin, "step_down": led.step_down, "clock": lambda: boot_clock() + slept_s}
    candidate = led.candidate = Candidate(registry, "a:1", ClaimTerms(ttl_s=6.0), **calls)
    async with background_task(candidate.run()), asyncio.timeout(PATIENCE_S):
        await began.wait()
        assert metrics.get_sample_value("moonserve_conductor_leads") == 1
        assert len(await registry.members()) == 1
        with pytest.raises(NotLeader):
            await led.Place(conductor_pb2.PlaceRequest(), None)
    assert not candidate.leads
    assert await registry.members() == []
    await registry.close()
