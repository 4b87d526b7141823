"""Tests of the conductor's service over real gRPC on loopback."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from moonserve.conductor.placement.admission import Limits
from moonserve.conductor.placement.policies import PUBLISHED_POLICY, make_policy
from moonserve.conductor.service import ConductorMetrics, ConductorService
from moonserve.conductor.state import ConductorState
from moonserve.conductor.wire import place_from_wire
from moonserve.protocol.errors import Incompatible, InvalidRequest, NoWorker, StaleLease
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey, pack_keys
from moonserve.protocol.membership.heartbeats import BlockLog, Membership
from moonserve.protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from moonserve.protocol.rpc.wire import failure_from_wire, to_message
from tests.conductor.cluster import LAYOUT, chain
from tests.patience import PATIENCE_S

TOKEN = "secret"


@dataclass
class Rig:
    """A running conductor and a client."""

    address: str
    registry: CollectorRegistry
    state: ConductorState
    channels: Channels
    stub: "conductor_pb2_grpc.ConductorAsyncStub"
    now: float = 100.0

    async def call(self, method: str, request: object) -> object:
        reply = await self.channels.call(getattr(self.stub, method), request, timeout_s=PATIENCE_S)
        self.state.validate()
        return reply

    async def join_pair(self) -> None:
        await self.call("Register", registration("p0", common_pb2.ROLE_PREFILL))
        await self.call("Register", registration("d0", common_pb2.ROLE_DECODE))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    registry = CollectorRegistry()
    state = ConductorState(make_policy(PUBLISHED_POLICY, 1.25), Limits(ttft_slo_s=5.0))
    server = RpcServer(TOKEN)
    service = ConductorService(state, ConductorMetrics(registry), clock=lambda: rig.now)
    conductor_pb2_grpc.add_ConductorServicer_to_server(service, server.grpc)
    async with server.serving("127.0.0.1", 0, 0) as address, Channels(TOKEN) as channels:
        stub = conductor_pb2_grpc.ConductorStub(channels.to(address))
        rig = Rig(address, registry, state, channels, stub)
        yield rig
    state.validate()


def registration(
    name: str, role: common_pb2.Role, epoch: int = 1, fingerprint: str = "f1"
) -> conductor_pb2.RegisterRequest:
    return conductor_pb2.RegisterRequest(
        endpoint=common_pb2.Endpoint(instance_id=name, epoch=epoch, rpc_address="a:1", transfer_address="t", host="h"),
        role=role,
        layout=to_message(common_pb2.KvLayout, LAYOUT),
        fingerprint=fingerprint,
        num_blocks=100,
        max_model_len=1000,
        prefill_profile=conductor_pb2.PrefillProfile(c1=0.01),
        decode_profile=conductor_pb2.DecodeProfile(c1=0.01),
    )


def wish(request_id: str, *, tokens: int = 100, keys: Sequence[BlockKey] = ()) -> conductor_pb2.PlaceRequest:
    return conductor_pb2.PlaceRequest(
        request_id=request_id, block_keys=pack_keys(keys), num_prompt_tokens=tokens, max_tokens=10
    )


@contextlib.asynccontextmanager
async def living(channels: Channels, addresses: str, name: str, role: common_pb2.Role) -> AsyncIterator[Membership]:
    """Runs the `Membership` client of an instance that holds nine blocks of chain a."""
    log = BlockLog()
    for key in chain("a", 9):
        log.added(key, NO_PARENT)
    member = Membership(channels, addresses, registration(name, role), conductor_pb2.Load, log)
    async with background_task(member.run()):
        yield member


FIRST = conductor_pb2.ReportRequest.PHASE_FIRST_TOKEN


def beat(name: str, **load: int) -> conductor_pb2.HeartbeatRequest:
    return conductor_pb2.HeartbeatRequest(instance_id=name, epoch=1, load=conductor_pb2.Load(**load))


async def view_of(rig: Rig) -> dict[str, conductor_pb2.InstanceView]:
    view = await rig.call("GetCluster", conductor_pb2.GetClusterRequest())
    return {each.endpoint.instance_id: each for each in view.instances}


async def test_a_request_is_placed_reported_and_explained(rig: Rig) -> None:
    """Record and metrics show the outcome: 1 s of compute was predicted; the request took 1.5 s, 0.5 s of it queued."""
    await rig.join_pair()
    request = wish("r0")
    request.expected_return = "within 9.0 s, by the client's hint"
    reply = await rig.call("Place", request)
    placement = reply.placement
    assert (placement.prefill.instance_id, placement.decode.instance_id) == ("p0", "d0")
    assert placement.predicted_ttft_s == pytest.approx(1.0)
    times = {"elapsed_s": 1.5, "queue_s": 0.5, "prefill_s": 1.0}
    await rig.call("Report", conductor_pb2.ReportRequest(request_id="r0", phase=FIRST, **times))
    explained = await rig.call("Explain", conductor_pb2.ExplainRequest(request_id="r0"))
    decision = json.loads(explained.decision_json)
    assert (decision["outcome"]["ttft_s"], decision["expected_return"]) == (1.5, request.expected_return)
    unknown = await rig.call("Explain", conductor_pb2.ExplainRequest(request_id="r1"))
    assert (explained.found, unknown.found) == (True, False)
    assert rig.registry.get_sample_value("moonserve_placements_total") == 1
    buckets = "moonserve_ttft_prediction_error_seconds_bucket"  # predicted minus actual: -0.5 s
    assert rig.registry.get_sample_value(buckets, {"le": "-1.0"}) == 0
    assert rig.registry.get_sample_value(buckets, {"le": "-0.3"}) == 1
    view = await rig.call("GetCluster", conductor_pb2.GetClusterRequest())
    errors = {accuracy.term: accuracy.p50 for accuracy in view.ttft_accuracy}
    assert errors.keys() == {"ttft", "queue", "prefill"}
    assert errors["queue"] == pytest.approx(1 / 3, rel=0.1)
    registry = CollectorRegistry()
    ConductorService(rig.state, ConductorMetrics(registry), clock=lambda: rig.now).tick()
    gauge, labels = "moonserve_conductor_ttft_error_ratio", {"term": "queue", "quantile": "0.5"}
    assert registry.get_sample_value(gauge, labels) == errors["queue"]


def test_session_id_is_that_of_the_conversation_or_empty() -> None:
    request = wish("r0")
    assert place_from_wire(request).session_id is None
    request.session_id = "x"
    assert place_from_wire(request).session_id == "x"


async def test_suspended_conductor_extends_leases_before_it_removes_instances(rig: Rig) -> None:
    """After a pause of the conductor, no instance is removed before the unread heartbeats can have been handled."""
    metrics = ConductorMetrics(CollectorRegistry())
    service = ConductorService(rig.state, metrics, clock=lambda: rig.now, away_after_s=2.5)
    await rig.join_pair()
    service.tick()
    rig.now += 20.0
    service.tick()
    assert (await view_of(rig)).keys() == {"p0", "d0"}
    for _ in range(3):  # the conductor listens again and hears only p0
        rig.now += 2.0
        await rig.call("Heartbeat", beat("p0"))
        service.tick()
    assert (await view_of(rig)).keys() == {"p0"}


async def test_overload_error_has_predictions_and_retry_after(rig: Rig) -> None:
    await rig.join_pair()
    for i in range(5):
        await rig.call("Place", wish(f"r{i}"))
    overloaded = (await rig.call("Place", wish("r5"))).overloaded
    assert overloaded.predicted_ttft_s == pytest.approx(6.0)
    assert overloaded.retry_after_s == pytest.approx(1.0)
    assert overloaded.reason == "ttft_slo"
    rejections = rig.registry.get_sample_value("moonserve_rejections_total", {"reason": "ttft_slo"})
    assert rejections == 1


async def test_errors_arrive_as_their_class(rig: Rig) -> None:
    reply = await rig.call("Place", wish("r0"))
    assert isinstance(failure_from_wire(reply.failure), NoWorker)
    await rig.call("Register", registration("p0", common_pb2.ROLE_PREFILL, epoch=2))
    with pytest.raises(StaleLease):
        await rig.call("Register", registration("p0", common_pb2.ROLE_PREFILL, epoch=1))
    with pytest.raises(Incompatible):
        await rig.call("Register", registration("d0", common_pb2.ROLE_DECODE, fingerprint="f2"))
    await rig.call("Register", registration("d0", common_pb2.ROLE_DECODE))
    reply = await rig.call("Place", wish("r0", tokens=1000))
    assert isinstance(failure_from_wire(reply.failure), InvalidRequest)


def registering(**change: object) -> conductor_pb2.RegisterRequest:
    message = registration("p0", common_pb2.ROLE_PREFILL)
    for name, value in change.items():
        message.ClearField(name)
        message.MergeFrom(conductor_pb2.RegisterRequest(**{name: value}))
    return message


BAD_PLACE = conductor_pb2.PlaceRequest(request_id="r0", block_keys=b"short", num_prompt_tokens=10)
BAD_EVENTS = conductor_pb2.BlockEvents(first_seq=1, added_keys=bytes(16), next_seq=2)


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Register", registering(role=common_pb2.ROLE_UNSPECIFIED)),
        ("Register", registering(layout=common_pb2.KvLayout())),
        ("Register", registering(prefill_profile=conductor_pb2.PrefillProfile(c1=-1.0))),
        ("Register", registering(decode_profile=conductor_pb2.DecodeProfile(c0=float("nan")))),
        ("Register", registering(transfer_bytes_per_s=-1.0)),
        ("Register", registering(endpoint=common_pb2.Endpoint())),
        ("Place", BAD_PLACE),
        ("Place", wish("")),
        ("Report", conductor_pb2.ReportRequest(request_id="r0")),
        ("Heartbeat", conductor_pb2.HeartbeatRequest(instance_id="p0", epoch=1, events=BAD_EVENTS)),
    ],
)
async def test_malformed_requests_are_invalid(rig: Rig, method: str, request_: object) -> None:
    await rig.join_pair()
    with pytest.raises(InvalidRequest):
        await rig.call(method, request_)


async def test_membership_feeds_the_index_and_leaves(rig: Rig) -> None:
    """`Membership`, the client of every instance, reports blocks to the index of the real service and leaves."""
    await rig.join_pair()
    store = living(rig.channels, rig.address, "s0", common_pb2.ROLE_STORE)
    async with store as member, asyncio.timeout(PATIENCE_S):
        await member.registered.wait()
        reply = await rig.call("Place", wish("r0", keys=chain("a", 10)))
        (source,) = reply.placement.prefix_sources
        assert (source.store.instance_id, source.first_block, source.num_blocks) == ("s0", 0, 9)
        await member.deregister()
    assert (await view_of(rig)).keys() == {"p0", "d0"}


async def test_cluster_view_has_the_workers_common_properties_and_loads(rig: Rig) -> None:
    empty = await rig.call("GetCluster", conductor_pb2.GetClusterRequest())
    assert (empty.ready, empty.HasField("layout")) == (False, False)
    await rig.join_pair()
    reply = await rig.call("Heartbeat", beat("d0", free_blocks=25, num_running=3))
    assert (reply.known, reply.resync) == (True, False)
    await rig.call("Place", wish("r0", tokens=200))
    view = await rig.call("GetCluster", conductor_pb2.GetClusterRequest())
    assert (view.ready, view.fingerprint, view.max_model_len) == (True, "f1", 1000)
    assert view.layout == to_message(common_pb2.KvLayout, LAYOUT)
    prefill, decode = view.instances
    assert prefill.need == pytest.approx(2.0 / 5.0)  # share of the TTFT objective
    assert decode.need == decode.use == pytest.approx(0.75)  # share of its blocks
    rig.now += 1.0
    decode = (await view_of(rig))["d0"]
    assert (decode.load.num_running, decode.last_heard_s) == (3, pytest.approx(1.0))
