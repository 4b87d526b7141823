"""Two rails between two hosts. If one fails in the middle of a batch, the other carries the rest."""

import threading
import time
from collections.abc import Callable, Hashable, Iterator

import pytest

from moonserve.protocol.errors import PeerLost
from moonserve.transfer import Op, TransferEngine
from moonserve.transfer.memory.write_windows import Window
from moonserve.transfer.paths.rail_health import CooldownRule, RailHealth, _ErrorRecord
from moonserve.transfer.paths.traffic_stats import Incident
from moonserve.transfer.tcp.exchange import TcpTarget
from moonserve.transfer.tcp.session import StreamSession
from moonserve.transfer.tcp.transport import TcpTransport
from moonserve.transfer.transport_interface import Dial
from tests.patience import NEVER_S, PATIENCE_S
from tests.transfer.conftest import RAILS, Make
from tests.transfer.proxy import LinkFault, Proxy, Towards
from tests.transfer.stage import Stage

TRANSPORTS = ["tcp"]

NBYTES = 16 << 20
FAILOVER_S = 24.0
"""Deadline of a batch that waits half of it for a silent rail and needs little time for the rest."""

A_REQUEST = 4096
"""More bytes than a handshake and one request for a slice take."""


@pytest.fixture(autouse=True)
def long_cooldowns(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two errors a rail cools down for longer than any test runs, unless the test ends that."""
    rule = CooldownRule(
        errors=2, within_s=NEVER_S, first_cooldown_s=NEVER_S, max_cooldown_s=NEVER_S, same_incident_s=0.001
    )
    monkeypatch.setattr("moonserve.transfer.paths.failover.RailHealth", lambda: RailHealth(rule))


class TwoRails(Stage):
    """Stage with one proxy in front of each rail of `far`. `near` knows only the proxies."""

    def __init__(self, make_engine: Make) -> None:
        super().__init__(make_engine, NBYTES, rails=RAILS)
        self.bad_links, self.address = self.proxies()

    def write(self, length: int = NBYTES) -> None:
        self.run(self.transfer(Op.WRITE, self.address, length))
        self.require_arrived()

    def cooling(self) -> list[Proxy]:
        """Returns the proxy of each path that cools down or was not used since then (one path from each local rail)."""
        by_endpoint = {proxy.endpoint: proxy for proxy in self.bad_links}
        return [by_endpoint[rails[2]] for rails in cooling_rails(self.near)]  # type: ignore[index]


def cooling_rails(engine: TransferEngine) -> dict[Hashable, _ErrorRecord]:
    (peer,) = engine._peers.by_address.values()
    records = peer._selector._health._records.items()
    return {rails: record for rails, record in records if record.cooldown_ends_at is not None}


@pytest.fixture
def rails(make_engine: Make) -> Iterator[TwoRails]:
    with TwoRails(make_engine) as rails:
        yield rails


def test_connections_use_the_chosen_rails(rails: TwoRails) -> None:
    rails.write()
    assert set.union(*(proxy.sources for proxy in rails.bad_links)) == set(RAILS)


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize(
    ("harm", "incident"),
    [(Proxy.cut, Incident.RETRY), pytest.param(Proxy.silence, Incident.FAILOVER, marks=pytest.mark.slow)],
)
def test_the_other_rail_carries_the_slices_of_a_cut_or_silent_one(
    rails: TwoRails, op: Op, harm: Callable[[Proxy], None], incident: Incident
) -> None:
    """Both rails are throttled so that the batch cannot end before a rail that carries part of it is harmed."""
    for proxy in rails.bad_links:
        proxy.bytes_s = 10e3
    batch = rails.near.submit([rails.transfer(op, rails.address, 4 << 20)], deadline_s=FAILOVER_S)
    while not (under_way := [proxy for proxy in rails.bad_links if proxy.num_bytes > A_REQUEST]):
        assert not batch.done
        threading.Event().wait(0.01)
    harm(under_way[0])
    assert not batch.done
    for proxy in rails.bad_links:
        proxy.bytes_s = None
    batch.wait(PATIENCE_S)
    rails.require_arrived()
    assert rails.count(incident) > 0


def test_a_failing_rail_cools_down_and_is_used_again_after_it_recovers(
    rails: TwoRails, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bad rail fails at once, however busy the machine is, so that the good rail has the batch's whole time."""
    for patience in ("paths.lane_queue._CONNECT_S", "tcp.session._SILENCE_S"):  # the good rail may be slow
        monkeypatch.setattr(f"moonserve.transfer.{patience}", NEVER_S)
    dialled: list[str] = []  # a rail whose connection failed is not used without a connection attempt
    connect = TcpTransport.connect

    def noted(transport: TcpTransport, dial: Dial) -> StreamSession:
        dialled.append(dial.remote.endpoint)
        return connect(transport, dial)

    monkeypatch.setattr(TcpTransport, "connect", noted)
    rails.write()
    bad, _ = rails.bad_links
    bad.reset = LinkFault(Towards.TARGET, at=0, times=1_000_000)
    bad.cut()
    for _ in range(100):
        rails.write()
        if rails.cooling().count(bad) == 2:
            break
    assert rails.count(Incident.COOLDOWN) > 0
    assert rails.cooling() == [bad, bad]
    dialled.clear()
    for _ in range(5):
        rails.write()  # a cooling rail is not even tried
    assert bad.endpoint not in dialled
    bad.reset = None
    for record in cooling_rails(rails.near).values():
        record.cooldown_ends_at = time.monotonic()
    for _ in range(100):
        rails.write(4 << 20)
        if not rails.cooling():
            break
    assert not rails.cooling()
    assert bad.endpoint in dialled


class HeldStore:
    """Blocks a target's serving thread in the middle of a store, once."""

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
        monkeypatch.setattr(TcpTarget, "_keep", lambda *_: False)  # not natively


def test_a_write_is_retried_only_after_its_first_copy_cannot_be_stored(
    rails: TwoRails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonserve.transfer.paths.lane._FENCE_S", NEVER_S)
    monkeypatch.setattr("moonserve.transfer.tcp.target._FENCE_S", NEVER_S)
    held = HeldStore(monkeypatch)
    batch = rails.near.submit([rails.transfer(Op.WRITE, rails.address, 100_000)], deadline_s=PATIENCE_S)
    assert held.entered.wait(PATIENCE_S)
    for proxy in rails.bad_links:
        proxy.cut()
    for _ in range(200):  # long enough for a second attempt that does not wait to finish
        assert not batch.done
        held.left.wait(0.005)
    rails.memory.buffer[:100_000] = bytes(100_000)
    held.go_on.set()
    batch.wait(PATIENCE_S)
    assert held.left.is_set()
    rails.memory.buffer[:100_000] = b"s" * 100_000  # the owner reuses the memory
    rails.far.close()
    assert rails.memory.buffer[:100_000] == b"s" * 100_000


def test_a_write_fails_if_its_first_copy_cannot_be_fenced(rails: TwoRails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonserve.transfer.tcp.target._FENCE_S", 0.2)
    held, before = HeldStore(monkeypatch), bytes(rails.memory.buffer[:100_000])
    batch = rails.near.submit([rails.transfer(Op.WRITE, rails.address, 100_000)], deadline_s=NEVER_S)
    assert held.entered.wait(PATIENCE_S)
    for proxy in rails.bad_links:
        proxy.cut()
    with pytest.raises(PeerLost):
        batch.wait(PATIENCE_S)
    assert rails.memory.buffer[:100_000] == before
    held.go_on.set()
