"""Tests of `ConductorClient` with several active conductors, over real sockets: whoever calls sees one conductor."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from moonserve.protocol.errors import NoWorker
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.membership.conductor_client import ConductorClient
from moonserve.protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, leadership_pb2, leadership_pb2_grpc
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from tests.patience import PATIENCE_S

TOKEN = "secret"
Reply = conductor_pb2.PlaceReply


class Scripted(conductor_pb2_grpc.ConductorServicer, leadership_pb2_grpc.LeadershipServicer):
    """An active conductor that notes the calls it gets."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.server = RpcServer(TOKEN)
        conductor_pb2_grpc.add_ConductorServicer_to_server(self, self.server.grpc)
        leadership_pb2_grpc.add_LeadershipServicer_to_server(self, self.server.grpc)
        self.address = ""
        self.hot: dict[BlockKey, int] = {}
        self.outcome: Reply | None = None  # instead of a placement
        self.move_to = ""
        self.answers = asyncio.Event()  # if cleared, it is like a stopped process
        self.answers.set()
        self.asked: list[str] = []

    async def Who(self, request: Any, context: Any) -> leadership_pb2.WhoReply:
        await self.answers.wait()
        return leadership_pb2.WhoReply(leads=True, epoch=1, is_shard=True)

    async def Exchange(self, request: Any, context: Any) -> conductor_pb2.ShardSummary:
        await self.answers.wait()
        return conductor_pb2.ShardSummary(
            address=self.address, num_prefills=1, num_decodes=1,
            hot_keys=b"".join(self.hot), branches=self.hot.values(),
        )  # fmt: skip

    async def Place(self, request: conductor_pb2.PlaceRequest, context: Any) -> Reply:
        self.asked.append("sent" if request.is_redirected else "place")
        await self.answers.wait()
        if self.outcome is not None and not request.is_redirected:
            return self.outcome
        return Reply(placement=common_pb2.Placement(request_id=self.name))

    async def Report(self, request: Any, context: Any) -> conductor_pb2.ReportReply:
        self.asked.append("report")
        return conductor_pb2.ReportReply()

    async def Explain(self, request: conductor_pb2.ExplainRequest, context: Any) -> conductor_pb2.ExplainReply:
        return conductor_pb2.ExplainReply(found=request.request_id == self.name, decision_json=self.name)

    async def GetCluster(self, request: Any, context: Any) -> conductor_pb2.ClusterView:
        view = conductor_pb2.ClusterView(ready=self.name == "b", fingerprint="f" if self.name == "b" else "")
        view.instances.add().endpoint.instance_id = self.name
        view.gateways.add(instance_id="the same")
        return view

    async def Register(self, request: Any, context: Any) -> conductor_pb2.RegisterReply:
        self.asked.append("register")
        return conductor_pb2.RegisterReply()

    async def Heartbeat(self, request: Any, context: Any) -> conductor_pb2.HeartbeatReply:
        self.asked.append("heartbeat")
        return conductor_pb2.HeartbeatReply(known=not self.move_to, move_to=self.move_to)


class Rig:
    """Three active conductors and a client of them."""

    def __init__(self) -> None:
        self.shards = [Scripted(name) for name in "abc"]
        self.channels = Channels(TOKEN)

    async def start(self) -> None:
        for shard in self.shards:
            shard.address = await shard.server.start("127.0.0.1", 0)
        self.client = ConductorClient(self.channels, ",".join(shard.address for shard in self.shards))

    async def place(self, key: bytes = b"k" * 16) -> str:
        """Returns the name of the shard that placed a prompt."""
        request = conductor_pb2.PlaceRequest(request_id="r", block_keys=key)
        reply = await self.client.call(lambda stub: stub.Place, request, timeout_s=PATIENCE_S)
        return str(reply.placement.request_id or reply.WhichOneof("outcome"))

    async def beat(self) -> bool:
        request = conductor_pb2.HeartbeatRequest(instance_id="worker")
        return bool((await self.client.call(lambda stub: stub.Heartbeat, request, timeout_s=PATIENCE_S)).known)

    def named(self, name: str) -> Scripted:
        return next(shard for shard in self.shards if shard.name == name)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.start()
    yield rig
    for shard in rig.shards:
        shard.answers.set()
    await rig.channels.close()
    for shard in rig.shards:
        await shard.server.stop(0)


async def test_a_prompt_goes_to_its_shard_and_its_reports_follow(rig: Rig) -> None:
    first = await rig.place()
    assert [await rig.place() for _ in range(3)] == [first] * 3
    assert {await rig.place(bytes([n]) * 16) for n in range(30)} == {"a", "b", "c"}
    report = conductor_pb2.ReportRequest(request_id="r", phase=conductor_pb2.ReportRequest.PHASE_FINISHED)
    rig.named(last := await rig.place()).asked.clear()
    for _ in range(2):  # the second is of a request that has ended
        await rig.client.call(lambda stub: stub.Report, report, timeout_s=PATIENCE_S)
    assert rig.named(last).asked == ["report"]


async def test_a_lost_a_stopped_and_a_useless_shard_are_passed_over(rig: Rig) -> None:
    first = await rig.place()
    rig.named(first).answers.clear()
    second = await rig.place()
    await rig.named(second).server.stop(0)
    third = await rig.place()
    assert {first, second, third} == {"a", "b", "c"}
    rig.named(third).outcome = Reply(failure=common_pb2.Failure(code=NoWorker.code, message="nobody"))
    rig.named(first).answers.set()
    placed_by = ""
    async with asyncio.timeout(PATIENCE_S):
        while placed_by != first:  # it is asked again once its summary has come
            with contextlib.suppress(NoWorker):
                placed_by = await rig.place()
            await asyncio.sleep(0.05)


async def test_a_prompt_is_placed_where_a_shard_sends_it(rig: Rig) -> None:
    first = rig.named(await rig.place())
    other = next(shard for shard in rig.shards if shard is not first)
    first.outcome = Reply(elsewhere=other.address)
    assert await rig.place() == other.name
    assert other.asked == ["sent"]
    await other.server.stop(0)
    assert await rig.place() == first.name
    assert first.asked[-2:] == ["place", "sent"]


async def test_prompts_with_a_hot_prefix_are_spread_by_what_follows(rig: Rig) -> None:
    hot = BlockKey(b"h" * 16)
    for shard in rig.shards:
        shard.hot = {hot: 1}
    assert {await rig.place(hot + bytes([n]) * 16) for n in range(30)} == {"a", "b", "c"}


async def test_one_view_and_one_explanation_of_all(rig: Rig) -> None:
    view = await rig.client.call(lambda stub: stub.GetCluster, conductor_pb2.GetClusterRequest(), timeout_s=PATIENCE_S)
    assert sorted(instance.endpoint.instance_id for instance in view.instances) == ["a", "b", "c"]
    assert (view.ready, view.fingerprint, len(view.gateways)) == (True, "f", 1)
    request = conductor_pb2.ExplainRequest(request_id="c")
    reply = await rig.client.call(lambda stub: stub.Explain, request, timeout_s=PATIENCE_S)
    assert reply.decision_json == "c"


async def test_an_instance_stays_until_it_is_sent_away_or_its_shard_is_lost(rig: Rig) -> None:
    register = conductor_pb2.RegisterRequest(endpoint=common_pb2.Endpoint(instance_id="worker"))
    await rig.client.call(lambda stub: stub.Register, register, timeout_s=PATIENCE_S)
    assert await rig.beat()
    [own] = [shard for shard in rig.shards if shard.asked == ["register", "heartbeat"]]
    target, other = (shard for shard in rig.shards if shard is not own)
    own.move_to = target.address
    assert not await rig.beat()
    assert await rig.beat()
    assert target.asked == ["heartbeat"]
    await target.server.stop(0)
    await own.server.stop(0)
    assert await rig.beat()
    assert other.asked[-1] == "heartbeat"
