"""Two rails between two hosts, one of which fails in the middle of a batch: the other carries the rest."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from protocol.errors import PeerLost
from tests.patience import NEVER_S, PATIENCE_S
from tests.transfer.conftest import RAILS, TOKEN
from tests.transfer.proxy import Proxy, Towards, Trouble
from transfer import Op, RemoteSegment, Transfer, TransferEngine, TransferOptions
from transfer.address import parse
from transfer.base import Dial
from transfer.paths.health import RailHealth, RestRule, _Trouble
from transfer.stats import Incident
from transfer.tcp.transport import TcpSession, TcpTransport
from transfer.windows import Window

NBYTES = 16 << 20
FAILOVER_S = 24.0
"""For a batch that waits half of it for a silent rail and needs little for the rest."""

A_REQUEST = 4096
"""More bytes than two ends need to know each other and one of them to ask for a slice."""


@pytest.fixture(autouse=True)
def easily_rested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two errors rest a rail for longer than any test takes, unless the test ends its rest."""
    rule = RestRule(errors=2, within_s=NEVER_S, first_rest_s=NEVER_S, longest_rest_s=NEVER_S, same_incident_s=0.001)
    monkeypatch.setattr("transfer.peer.RailHealth", lambda: RailHealth(rule))


class TwoRails:
    """`far` behind one proxy per rail; `near` knows only those."""

    def __init__(self, closing: ExitStack) -> None:
        options = TransferOptions(transports=("tcp",), rails=RAILS, slice_bytes=256 << 10)
        self.near = TransferEngine(cluster_token=TOKEN, options=options)
        self.far = TransferEngine(cluster_token=TOKEN, options=options)
        for engine in (self.near, self.far):
            engine.start()
            closing.callback(engine.close)
        address = parse(self.far.address)
        rails = address.rails["tcp"]
        self.proxies = [Proxy(rail.endpoint, host) for rail, host in zip(rails, RAILS, strict=True)]
        for proxy in self.proxies:
            closing.callback(proxy.close)
        behind = tuple(replace(rail, endpoint=proxy.endpoint) for rail, proxy in zip(rails, self.proxies, strict=True))
        self.address = str(replace(address, rails={"tcp": behind}))
        self.local = self.near.allocate(NBYTES)
        self.memory = self.far.allocate(NBYTES, readable=True)
        self.window_id = self.far.open_window(self.memory, [(0, NBYTES)])
        self.rng = random.Random(3)

    def transfer(self, op: Op, length: int = NBYTES) -> Transfer:
        source = self.local if op is Op.WRITE else self.memory
        source.buffer[:length] = self.rng.randbytes(length)
        window_id = self.window_id if op is Op.WRITE else None
        remote = RemoteSegment(self.address, self.memory.segment_id)
        return Transfer(op, self.local, 0, remote, 0, length, window_id)

    def run(self, op: Op, deadline_s: float = PATIENCE_S, length: int = NBYTES) -> None:
        batch = self.near.submit([self.transfer(op, length)], deadline_s=deadline_s)
        batch.wait(deadline_s + PATIENCE_S)
        assert self.local.buffer[:length] == self.memory.buffer[:length]

    def count(self, incident: Incident) -> int:
        return sum(stats.incidents[incident] for stats in self.near.stats)

    def rested(self) -> list[Proxy]:
        """Where the paths lead that rest, or have and were not used since; one from each local rail to each proxy."""
        by_endpoint = {proxy.endpoint: proxy for proxy in self.proxies}
        return [by_endpoint[rails[2]] for rails in resting(self.near)]  # type: ignore[index]


def resting(engine: TransferEngine) -> dict[Hashable, _Trouble]:
    (peer,) = engine._peers.met.values()
    troubles = peer._chooser._health._troubles.items()
    return {rails: trouble for rails, trouble in troubles if trouble.rest_ends_at is not None}


def end_rests(engine: TransferEngine) -> None:
    for trouble in resting(engine).values():
        trouble.rest_ends_at = time.monotonic()


@pytest.fixture
def rails() -> Iterator[TwoRails]:
    with ExitStack() as closing:
        yield TwoRails(closing)


def in_the_middle_of(rails: TwoRails, op: Op, harm: Callable[[Proxy], None]) -> None:
    """A batch over both rails, too slow to end before one of them, which carries some of it, is harmed."""
    for proxy in rails.proxies:
        proxy.bytes_s = 10e3
    batch = rails.near.submit([rails.transfer(op, 4 << 20)], deadline_s=FAILOVER_S)
    while not (under_way := [p for p in rails.proxies if p.num_bytes > A_REQUEST]):
        assert not batch.done
        threading.Event().wait(0.01)
    harm(under_way[0])
    assert not batch.done
    for proxy in rails.proxies:
        proxy.bytes_s = None
    batch.wait(PATIENCE_S)
    assert rails.local.buffer[: 4 << 20] == rails.memory.buffer[: 4 << 20]


def test_connections_leave_by_the_rails_that_were_chosen(rails: TwoRails) -> None:
    rails.run(Op.WRITE)
    assert set.union(*(proxy.sources for proxy in rails.proxies)) == set(RAILS)


@pytest.mark.parametrize("op", list(Op))
def test_the_other_rail_carries_what_a_cut_one_cannot(rails: TwoRails, op: Op) -> None:
    in_the_middle_of(rails, op, Proxy.cut)
    assert rails.count(Incident.RETRY) > 0


@pytest.mark.slow
@pytest.mark.parametrize("op", list(Op))
def test_the_other_rail_carries_what_a_silent_one_cannot(rails: TwoRails, op: Op) -> None:
    def silence(proxy: Proxy) -> None:
        proxy.silent = True

    in_the_middle_of(rails, op, silence)
    assert rails.count(Incident.FAILOVER) > 0


def endpoints_dialled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each attempt; a rail whose connection has failed is not used without one."""
    dialled: list[str] = []
    connect = TcpTransport.connect

    def noted(transport: TcpTransport, dial: Dial) -> TcpSession:
        dialled.append(dial.remote.endpoint)
        return connect(transport, dial)

    monkeypatch.setattr(TcpTransport, "connect", noted)
    return dialled


def test_a_rail_that_keeps_failing_rests_and_is_used_again_once_it_is_well(
    rails: TwoRails, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails at once, however busy the machine is, so that the good one has all the time of the batch."""
    for patience in ("waiting._CONNECT_S", "tcp.session._SILENCE_S"):  # the good one may be slow
        monkeypatch.setattr(f"transfer.{patience}", NEVER_S)
    dialled = endpoints_dialled(monkeypatch)
    rails.run(Op.WRITE)
    bad, _ = rails.proxies
    bad.reset = Trouble(Towards.TARGET, at=0, times=1_000_000)
    bad.cut()
    for _ in range(100):
        rails.run(Op.WRITE)
        if rails.rested().count(bad) == 2:
            break
    assert rails.count(Incident.REST) > 0
    assert rails.rested() == [bad, bad]
    dialled.clear()
    for _ in range(5):
        rails.run(Op.WRITE)  # what rests is not even tried
    assert bad.endpoint not in dialled
    bad.reset = None
    end_rests(rails.near)
    for _ in range(100):
        rails.run(Op.WRITE, length=4 << 20)
        if not rails.rested():
            break
    assert not rails.rested()
    assert bad.endpoint in dialled


class HeldStore:
    """Holds a target's serving thread in the middle of a store, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go_on, self.left = (threading.Event() for _ in range(3))
        enter = Window.__enter__

        def held(window: Window) -> None:
            enter(window)
            if not self.entered.is_set():
                self.entered.set()
                self.go_on.wait(NEVER_S)
                self.left.set()

        monkeypatch.setattr(Window, "__enter__", held)


def test_a_write_is_tried_again_only_when_its_first_copy_can_no_longer_be_stored(
    rails: TwoRails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.lane._FENCE_S", NEVER_S)
    monkeypatch.setattr("transfer.tcp.target._FENCE_S", NEVER_S)
    held = HeldStore(monkeypatch)
    batch = rails.near.submit([rails.transfer(Op.WRITE, 100_000)], deadline_s=PATIENCE_S)
    assert held.entered.wait(PATIENCE_S)
    for proxy in rails.proxies:
        proxy.cut()
    for _ in range(200):  # a second attempt that does not wait would be over by now
        assert not batch.done
        held.left.wait(0.005)
    rails.memory.buffer[:100_000] = bytes(100_000)
    held.go_on.set()
    batch.wait(PATIENCE_S)
    assert held.left.is_set()
    rails.memory.buffer[:100_000] = b"s" * 100_000  # the owner goes on
    rails.far.close()
    assert rails.memory.buffer[:100_000] == b"s" * 100_000


def test_a_write_whose_first_copy_cannot_be_ended_fails_instead_of_being_sent_again(
    rails: TwoRails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.tcp.target._FENCE_S", 0.2)
    held = HeldStore(monkeypatch)
    batch = rails.near.submit([rails.transfer(Op.WRITE, 100_000)], deadline_s=NEVER_S)
    assert held.entered.wait(PATIENCE_S)
    for proxy in rails.proxies:
        proxy.cut()
    with pytest.raises(PeerLost):
        batch.wait(PATIENCE_S)
    assert rails.memory.buffer[:100_000] == bytes(100_000)
    held.go_on.set()
