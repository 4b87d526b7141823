"""Tests of `ConductorClient`, over real sockets: a call reaches the leading or an active conductor."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from moonserve.deploy.launcher.ports import free_port
from moonserve.protocol.errors import ConfigError, NotLeader, NoWorker, Overloaded, PeerLost
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.membership.conductor_client import SILENT_LEADER_S, ConductorClient, parse_addresses
from moonserve.protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, leadership_pb2, leadership_pb2_grpc
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from tests.patience import PATIENCE_S, answered

TOKEN = "secret"
Reply = conductor_pb2.PlaceReply


class Scripted(conductor_pb2_grpc.ConductorServicer, leadership_pb2_grpc.LeadershipServicer):
    """A conductor that notes the calls it gets, and answers `Explain` and `Place` with its own name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.server = RpcServer(TOKEN)
        conductor_pb2_grpc.add_ConductorServicer_to_server(self, self.server.grpc)
        leadership_pb2_grpc.add_LeadershipServicer_to_server(self, self.server.grpc)
        self.address = ""
        self.epoch = 0  # it leads when above 0
        self.is_shard = False
        self.hint = ""
        self.hot: dict[BlockKey, int] = {}
        self.outcome: Reply | None = None  # instead of a placement
        self.move_to = ""
        self.answers = asyncio.Event()  # if cleared, it never answers, like a stopped process
        self.answers.set()
        self.reached = asyncio.Event()  # set by each `Explain`
        self.asked: list[str] = []
        self.error: Exception | None = None

    async def Who(self, request: Any, context: Any) -> leadership_pb2.WhoReply:
        await self.answers.wait()
        return leadership_pb2.WhoReply(
            leads=self.epoch > 0, epoch=self.epoch, leader_address=self.hint, is_shard=self.is_shard
        )

    async def Explain(self, request: conductor_pb2.ExplainRequest, context: Any) -> conductor_pb2.ExplainReply:
        self.asked.append("explain")
        self.reached.set()
        await self._wait()
        if not self.epoch:
            raise NotLeader("not me")
        return conductor_pb2.ExplainReply(found=request.request_id == self.name, decision_json=self.name)

    async def _wait(self) -> None:
        await self.answers.wait()
        if self.error is not None:
            raise self.error

    async def Exchange(self, request: Any, context: Any) -> conductor_pb2.ShardSummary:
        await self._wait()
        return conductor_pb2.ShardSummary(
            address=self.address, num_prefills=1, num_decodes=1,
            hot_keys=b"".join(self.hot), branches=self.hot.values(),
        )  # fmt: skip

    async def Place(self, request: conductor_pb2.PlaceRequest, context: Any) -> Reply:
        self.asked.append("sent" if request.is_redirected else "place")
        await self._wait()
        if self.outcome is not None and not request.is_redirected:
            return self.outcome
        return Reply(placement=common_pb2.Placement(request_id=self.name))

    async def Report(self, request: Any, context: Any) -> conductor_pb2.ReportReply:
        self.asked.append("report")
        return conductor_pb2.ReportReply()

    async def GetCluster(self, request: Any, context: Any) -> conductor_pb2.ClusterView:
        view = conductor_pb2.ClusterView(ready=self.name == "b", fingerprint="f" if self.name == "b" else "")
        view.instances.add().endpoint.instance_id = self.name
        view.gateways.add(instance_id="the same")
        return view

    async def Register(self, request: Any, context: Any) -> conductor_pb2.RegisterReply:
        self.asked.append("register")
        return conductor_pb2.RegisterReply()

    async def Heartbeat(self, request: Any, context: Any) -> conductor_pb2.HeartbeatReply:
        await self._wait()
        self.asked.append("heartbeat")
        return conductor_pb2.HeartbeatReply(known=not self.move_to, move_to=self.move_to)


class Rig:
    """Three conductors, and clients of some or all of them."""

    def __init__(self) -> None:
        self.conductors = self.a, self.b, self.c = Scripted("a"), Scripted("b"), Scripted("c")
        self.channels = Channels(TOKEN)

    async def start(self) -> None:
        for scripted in self.conductors:
            scripted.address = await scripted.server.start("127.0.0.1", 0)
        self.of_all = self.client("abc")

    def client(self, names: str = "ab") -> ConductorClient:
        return ConductorClient(self.channels, ", ".join(self.named(name).address for name in names))

    async def place(self, key: bytes = b"k" * 16, request_id: str = "r") -> str:
        """Returns the name of the active conductor that placed a prompt."""
        request = conductor_pb2.PlaceRequest(request_id=request_id, block_keys=key)
        reply = await self.of_all.call(lambda stub: stub.Place, request, timeout_s=PATIENCE_S)
        return str(reply.placement.request_id or reply.WhichOneof("outcome"))

    async def beat(self) -> bool:
        request = conductor_pb2.HeartbeatRequest(instance_id="worker")
        return bool((await self.of_all.call(lambda stub: stub.Heartbeat, request, timeout_s=PATIENCE_S)).known)

    def named(self, name: str) -> Scripted:
        return next(scripted for scripted in self.conductors if scripted.name == name)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.start()
    yield rig
    for scripted in rig.conductors:
        scripted.answers.set()
    await rig.channels.close()
    for scripted in rig.conductors:
        await scripted.server.stop(0)


async def explain(conductors: ConductorClient, timeout_s: float = PATIENCE_S) -> str:
    """Returns the name of the conductor that answered."""
    request = conductor_pb2.ExplainRequest(request_id="r")
    reply = await conductors.call(lambda c: c.Explain, request, timeout_s=timeout_s)
    return str(reply.decision_json)


async def test_call_goes_to_leader_and_remembers_it(rig: Rig) -> None:
    rig.b.epoch = 1
    conductors = rig.client()
    assert [await explain(conductors) for _ in range(3)] == ["b"] * 3
    assert rig.a.asked == []


@pytest.mark.parametrize("dies", [False, True])
async def test_call_finds_new_leader_if_leader_dies_or_resigns(rig: Rig, dies: bool) -> None:
    rig.a.epoch = 1
    conductors = rig.client()
    assert await explain(conductors) == "a"
    if dies:
        await rig.a.server.stop(0)
    rig.a.epoch, rig.b.epoch = 0, 2
    assert await explain(conductors) == "b"


async def test_call_waits_until_a_conductor_leads(rig: Rig) -> None:
    conductors = rig.client()
    waiting = [asyncio.create_task(explain(conductors)) for _ in range(3)]
    await asyncio.wait(waiting, timeout=0)
    assert not any(task.done() for task in waiting)
    rig.b.epoch = 1
    assert await asyncio.gather(*waiting) == ["b"] * 3


async def test_all_waiting_calls_leave_a_silent_leader(rig: Rig) -> None:
    """All calls move on to the next leader, also calls that look for it after others have found it."""
    rig.a.epoch = 1
    conductors = rig.client()
    assert await explain(conductors) == "a"
    rig.a.answers.clear()
    calls = []
    for _ in range(6):
        rig.a.reached.clear()
        calls.append(asyncio.create_task(explain(conductors)))
        await rig.a.reached.wait()
        await asyncio.wait(calls, timeout=SILENT_LEADER_S / 4)
    rig.b.epoch = 2
    assert await asyncio.gather(*calls) == ["b"] * 6


@pytest.mark.parametrize("known", ["ab", "a"])
async def test_call_stays_with_slow_leader_while_no_other_leads(rig: Rig, known: str) -> None:
    rig.a.epoch = 1

    async def times_asked() -> int:
        """Returns 0 if the time ran out before the call reached the leader."""
        rig.a.answers.set()
        conductors = rig.client(known)
        conductors._is_single = False  # also with one address, as if it had once answered NotLeader
        assert await explain(conductors) == "a"
        rig.a.answers.clear()
        asked = len(rig.a.asked)
        with pytest.raises(PeerLost):
            await explain(conductors, timeout_s=1.0)
        return len(rig.a.asked) - asked

    assert await answered(times_asked) == 1, "asked again although it was only slow"


async def test_later_epoch_wins_between_two_leaders(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    # It waits for both answers.
    monkeypatch.setattr("moonserve.protocol.membership.conductor_client.WHO_TIMEOUT_S", PATIENCE_S)
    rig.a.epoch, rig.b.epoch = 1, 2
    assert await explain(rig.client()) == "b"


async def test_error_of_leader_is_not_retried(rig: Rig) -> None:
    rig.a.epoch, rig.a.error = 1, Overloaded("full", retry_after_s=2.0)
    with pytest.raises(Overloaded):
        await explain(rig.client())
    assert rig.a.asked == ["explain"]


async def test_call_raises_not_leader_by_its_deadline(rig: Rig) -> None:
    with pytest.raises(NotLeader, match="leads"):
        await explain(rig.client(), timeout_s=2.0)


async def test_cancelled_call_does_not_cancel_shared_search(rig: Rig) -> None:
    conductors = rig.client()
    cancelled = asyncio.create_task(explain(conductors))
    waiting = asyncio.create_task(explain(conductors))
    await asyncio.wait([cancelled], timeout=0)
    cancelled.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cancelled
    rig.a.epoch = 1
    assert await waiting == "a"


async def test_leader_found_by_hint_stays_known(rig: Rig) -> None:
    rig.c.epoch, rig.a.hint = 3, rig.c.address
    conductors = rig.client("a")
    assert await explain(conductors) == "c"
    await rig.a.server.stop(0)
    rig.c.error = PeerLost("for once")
    call = asyncio.create_task(explain(conductors))
    rig.c.reached.clear()
    async with asyncio.timeout(PATIENCE_S):
        await rig.c.reached.wait()
        rig.c.error = None
        assert await call == "c"


async def test_single_address_is_called_directly(rig: Rig) -> None:
    rig.a.epoch = 1
    assert await explain(rig.client("a")) == "a"
    unreachable = ConductorClient(rig.channels, f"127.0.0.1:{free_port()}")
    with pytest.raises(PeerLost):
        await explain(unreachable)


@pytest.mark.parametrize("text", ["", "host", "a:1,", "a:1,b:x", ":1"])
def test_malformed_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        parse_addresses(text)


def test_addresses_are_split_at_commas_without_duplicates() -> None:
    assert parse_addresses("a:1, b:2,a:1") == ("a:1", "b:2")


# ---- several active conductors: whoever calls sees one


@pytest.fixture
def shards(rig: Rig) -> Rig:
    for shard in rig.conductors:
        shard.epoch, shard.is_shard = 1, True
    return rig


async def test_a_prompt_goes_to_its_shard_and_its_reports_follow(shards: Rig) -> None:
    first = await shards.place()
    assert [await shards.place() for _ in range(3)] == [first] * 3
    assert {await shards.place(bytes([n]) * 16) for n in range(30)} == {"a", "b", "c"}
    report = conductor_pb2.ReportRequest(request_id="r", phase=conductor_pb2.ReportRequest.PHASE_FINISHED)
    shards.named(last := await shards.place()).asked.clear()
    for _ in range(2):  # the second is of a request that has ended
        await shards.of_all.call(lambda stub: stub.Report, report, timeout_s=PATIENCE_S)
    assert shards.named(last).asked == ["report"]


async def test_a_lost_a_stopped_and_a_useless_shard_are_passed_over(shards: Rig) -> None:
    first = await shards.place()
    shards.named(first).answers.clear()
    second = await shards.place()
    shards.named(second).error = PeerLost("gone")
    third = await shards.place()
    assert {first, second, third} == {"a", "b", "c"}
    shards.named(third).outcome = Reply(failure=common_pb2.Failure(code=NoWorker.code, message="nobody"))
    shards.named(first).answers.set()
    placed_by = ""
    async with asyncio.timeout(PATIENCE_S):
        while placed_by != first:  # it is asked again once its summary has come
            with contextlib.suppress(NoWorker):
                placed_by = await shards.place()
            await asyncio.sleep(0.05)


async def test_a_prompt_is_placed_where_a_shard_sends_it(shards: Rig) -> None:
    first = shards.named(await shards.place())
    other = next(shard for shard in shards.conductors if shard is not first)
    first.outcome = Reply(elsewhere=other.address)
    assert await shards.place() == other.name
    assert other.asked == ["sent"]
    other.error = PeerLost("gone")
    assert await shards.place() == first.name
    assert first.asked[-2:] == ["place", "sent"]


async def test_prompts_with_a_hot_prefix_are_spread_by_what_follows(shards: Rig) -> None:
    hot = BlockKey(b"h" * 16)
    for shard in shards.conductors:
        shard.hot = {hot: 2}
    shards.a.hot = {hot: 1}  # where the earliest prompts differ, also for the others
    assert len({await shards.place(hot + b"k" * 16, str(n)) for n in range(30)}) == 1
    assert {await shards.place(hot + bytes([n]) * 16) for n in range(30)} == {"a", "b", "c"}


async def test_one_view_and_one_explanation_of_all(shards: Rig) -> None:
    view = await shards.of_all.call(
        lambda stub: stub.GetCluster, conductor_pb2.GetClusterRequest(), timeout_s=PATIENCE_S
    )
    assert sorted(instance.endpoint.instance_id for instance in view.instances) == ["a", "b", "c"]
    assert (view.ready, view.fingerprint, len(view.gateways)) == (True, "f", 1)
    request = conductor_pb2.ExplainRequest(request_id="c")
    reply = await shards.of_all.call(lambda stub: stub.Explain, request, timeout_s=PATIENCE_S)
    assert reply.decision_json == "c"


async def test_an_instance_stays_until_it_is_sent_away_or_its_shard_is_lost(shards: Rig) -> None:
    register = conductor_pb2.RegisterRequest(endpoint=common_pb2.Endpoint(instance_id="worker"))
    await shards.of_all.call(lambda stub: stub.Register, register, timeout_s=PATIENCE_S)
    assert await shards.beat()
    [own] = [shard for shard in shards.conductors if shard.asked == ["register", "heartbeat"]]
    target, other = (shard for shard in shards.conductors if shard is not own)
    own.move_to = target.address
    assert not await shards.beat()
    assert await shards.beat()
    assert target.asked == ["heartbeat"]
    target.error = PeerLost("gone")
    own.error = PeerLost("gone")
    assert await shards.beat()
    assert other.asked[-1] == "heartbeat"
