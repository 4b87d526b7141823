"""Tests of `ConductorClient`: a call reaches the leading one of several conductors, over real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from moonserve.deploy.launcher.ports import free_port
from moonserve.protocol.errors import ConfigError, NotLeader, Overloaded, PeerLost
from moonserve.protocol.membership.conductor_client import SILENT_LEADER_S, ConductorClient, parse_addresses
from moonserve.protocol.pb import conductor_pb2, conductor_pb2_grpc, leadership_pb2, leadership_pb2_grpc
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from tests.patience import PATIENCE_S as LONG_ENOUGH_S
from tests.patience import answered

TOKEN = "secret"


class Scripted(conductor_pb2_grpc.ConductorServicer, leadership_pb2_grpc.LeadershipServicer):
    """A conductor that answers `Explain` with its own name while it leads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 0  # it leads when above 0
        self.hint = ""
        self.answers = asyncio.Event()  # if cleared, it never answers, like a stopped process
        self.answers.set()
        self.asked = asyncio.Event()
        self.num_asked = 0
        self.error: Exception | None = None

    async def Explain(self, request: Any, context: Any) -> conductor_pb2.ExplainReply:
        self.num_asked += 1
        self.asked.set()
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        if not self.epoch:
            raise NotLeader("not me")
        return conductor_pb2.ExplainReply(found=True, decision_json=self.name)

    async def Who(self, request: Any, context: Any) -> leadership_pb2.WhoReply:
        await self.answers.wait()
        return leadership_pb2.WhoReply(leads=self.epoch > 0, epoch=self.epoch, leader_address=self.hint)


class Rig:
    """Two conductors, a and b, that clients know, and one that clients do not know."""

    def __init__(self) -> None:
        self.a, self.b, self.unknown = Scripted("a"), Scripted("b"), Scripted("unknown")
        self.channels = Channels(TOKEN)
        self.addresses: dict[str, str] = {}
        self.servers: dict[str, RpcServer] = {}

    async def start(self) -> None:
        for scripted in (self.a, self.b, self.unknown):
            server = self.servers[scripted.name] = RpcServer(TOKEN)
            conductor_pb2_grpc.add_ConductorServicer_to_server(scripted, server.grpc)
            leadership_pb2_grpc.add_LeadershipServicer_to_server(scripted, server.grpc)
            self.addresses[scripted.name] = await server.start("127.0.0.1", 0)

    def client(self) -> ConductorClient:
        return ConductorClient(self.channels, f"{self.addresses['a']}, {self.addresses['b']}")

    async def close(self) -> None:
        for scripted in (self.a, self.b, self.unknown):
            scripted.answers.set()
        await self.channels.close()
        for server in self.servers.values():
            await server.stop(0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.start()
    yield rig
    await rig.close()


async def explain(conductors: ConductorClient, timeout_s: float = LONG_ENOUGH_S) -> str:
    """Returns the name of the conductor that answered."""
    request = conductor_pb2.ExplainRequest(request_id="r")
    reply = await conductors.call(lambda c: c.Explain, request, timeout_s=timeout_s)
    return str(reply.decision_json)


async def test_call_goes_to_leader_and_remembers_it(rig: Rig) -> None:
    rig.b.epoch = 1
    conductors = rig.client()
    assert [await explain(conductors) for _ in range(3)] == ["b"] * 3
    assert rig.a.num_asked == 0


@pytest.mark.parametrize("dies", [False, True])
async def test_call_finds_new_leader_if_leader_dies_or_resigns(rig: Rig, dies: bool) -> None:
    rig.a.epoch = 1
    conductors = rig.client()
    assert await explain(conductors) == "a"
    if dies:
        await rig.servers["a"].stop(0)
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
        rig.a.asked.clear()
        calls.append(asyncio.create_task(explain(conductors)))
        await rig.a.asked.wait()
        await asyncio.wait(calls, timeout=SILENT_LEADER_S / 4)
    rig.b.epoch = 2
    assert await asyncio.gather(*calls) == ["b"] * 6


async def test_call_stays_with_slow_leader_while_no_other_leads(rig: Rig) -> None:
    rig.a.epoch = 1

    async def times_asked() -> int:
        """Returns 0 if the time ran out before the call reached the leader."""
        rig.a.answers.set()
        conductors = rig.client()
        assert await explain(conductors) == "a"
        rig.a.answers.clear()
        asked = rig.a.num_asked
        with pytest.raises(PeerLost):
            await explain(conductors, timeout_s=1.0)
        return rig.a.num_asked - asked

    assert await answered(times_asked) == 1, "asked again although it was only slow"


async def test_call_waits_for_slow_leader_at_the_only_address(rig: Rig) -> None:
    rig.a.epoch = 1
    conductors = ConductorClient(rig.channels, rig.addresses["a"])
    conductors._is_single = False  # as if it had once answered NotLeader
    assert await explain(conductors) == "a"
    rig.a.answers.clear()
    with pytest.raises(PeerLost):
        await explain(conductors, timeout_s=1.0)


async def test_later_epoch_wins_between_two_leaders(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "moonserve.protocol.membership.conductor_client.WHO_TIMEOUT_S", LONG_ENOUGH_S
    )  # waits for both answers
    rig.a.epoch, rig.b.epoch = 1, 2
    assert await explain(rig.client()) == "b"


async def test_error_of_leader_is_not_retried(rig: Rig) -> None:
    rig.a.epoch, rig.a.error = 1, Overloaded("full", retry_after_s=2.0)
    with pytest.raises(Overloaded):
        await explain(rig.client())
    assert rig.a.num_asked == 1


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
    rig.unknown.epoch, rig.a.hint = 3, rig.addresses["unknown"]
    conductors = ConductorClient(rig.channels, rig.addresses["a"])
    assert await explain(conductors) == "unknown"
    await rig.servers["a"].stop(0)
    rig.unknown.error = PeerLost("for once")
    call = asyncio.create_task(explain(conductors))
    rig.unknown.asked.clear()
    async with asyncio.timeout(LONG_ENOUGH_S):
        await rig.unknown.asked.wait()
        rig.unknown.error = None
        assert await call == "unknown"


async def test_single_address_is_called_directly(rig: Rig) -> None:
    rig.a.epoch = 1
    assert await explain(ConductorClient(rig.channels, rig.addresses["a"])) == "a"
    unreachable = ConductorClient(rig.channels, f"127.0.0.1:{free_port()}")
    with pytest.raises(PeerLost):
        await explain(unreachable)


@pytest.mark.parametrize("text", ["", "host", "a:1,", "a:1,b:x", ":1"])
def test_malformed_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        parse_addresses(text)


def test_addresses_are_split_at_commas_without_duplicates() -> None:
    assert parse_addresses("a:1, b:2,a:1") == ("a:1", "b:2")
