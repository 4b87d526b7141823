"""Two rails between two hosts, one of which fails in the middle of a batch: the other carries the rest."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest

from protocol.errors import PeerLost
from tests.transfer.conftest import TOKEN, PeerInProcess
from tests.transfer.proxy import Proxy
from transfer import Op, RemoteSegment, Transfer, TransferEngine, TransferOptions
from transfer.address import parse
from transfer.rails.health import RailHealth, RestRule
from transfer.stats import Incident
from transfer.windows import Window

RAILS = ("127.0.0.1", "127.0.0.2")
NBYTES = 16 << 20
REST_S = 0.5


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RestRule(errors=2, first_rest_s=REST_S, longest_rest_s=2 * REST_S, same_incident_s=0.001)
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
        behind = tuple(
            replace(rail, endpoint=proxy.endpoint)
            for rail, proxy in zip(rails, self.proxies, strict=True)
        )
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

    def run(self, op: Op, deadline_s: float = 20, length: int = NBYTES) -> None:
        self.near.submit([self.transfer(op, length)], deadline_s=deadline_s).wait(deadline_s + 5)
        assert self.local.buffer[:length] == self.memory.buffer[:length]

    def count(self, incident: Incident) -> int:
        return sum(stats.incidents[incident] for stats in self.near.stats)

    def busiest(self) -> Proxy:
        """The one with the most under way."""
        (peer,) = self.near._peers.values()
        terms = peer._chooser.explain("cpu:0", time.monotonic())
        most = max(terms, key=lambda each: each.in_flight_bytes)
        assert most.in_flight_bytes
        return next(p for p in self.proxies if p.endpoint == most.path.remote.endpoint)

    def rested(self) -> bool:
        (peer,) = self.near._peers.values()
        return any(
            terms.rest_ends_at is not None
            for terms in peer._chooser.explain("cpu:0", time.monotonic())
        )


@pytest.fixture
def rails() -> Iterator[TwoRails]:
    with ExitStack() as closing:
        yield TwoRails(closing)


def in_the_middle_of(rails: TwoRails, op: Op, harm: Callable[[Proxy], None]) -> None:
    """A slow batch over both rails, one of which is harmed."""
    rails.run(op)  # both are connected now
    for proxy in rails.proxies:
        proxy.bytes_s = 10e6
    transfer = rails.transfer(op)
    begin = time.monotonic()
    batch = rails.near.submit([transfer], deadline_s=12)
    timer = threading.Timer(0.2, lambda: harm(rails.busiest()))  # by then it is under way
    timer.start()
    timer.join()
    assert not batch.done
    batch.wait(20)
    assert time.monotonic() - begin < 12
    assert rails.local.buffer == rails.memory.buffer


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


def test_a_rail_that_keeps_failing_rests_and_is_used_again_once_it_is_well(
    rails: TwoRails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.job._CONNECT_S", 0.2)
    rails.run(Op.WRITE)
    bad = rails.proxies[0]
    bad.silent = True
    for _ in range(10):
        rails.run(Op.WRITE, deadline_s=2)
        if rails.count(Incident.REST):
            break
    assert rails.count(Incident.REST) > 0
    assert rails.rested()
    begin = time.monotonic()
    rails.run(Op.WRITE)  # what rests is not even tried
    assert time.monotonic() - begin < 1
    bad.silent = False
    carried = bad.num_connections
    healed = False
    for _ in range(100):
        rails.run(Op.WRITE, length=4 << 20)
        if healed := bad.num_connections > carried and not rails.rested():
            break
        threading.Event().wait(0.05)
    assert healed


def test_a_peer_whose_rails_are_all_down_is_lost_within_the_deadline(rails: TwoRails) -> None:
    rails.run(Op.READ)
    for proxy in rails.proxies:
        proxy.silent = True
    begin = time.monotonic()
    with pytest.raises(PeerLost):
        rails.run(Op.READ, deadline_s=1)
    assert time.monotonic() - begin < 2


class HeldStore:
    """Holds a target's serving thread in the middle of a store, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go_on, self.left = (threading.Event() for _ in range(3))
        enter = Window.__enter__

        def held(window: Window) -> None:
            enter(window)
            if not self.entered.is_set():
                self.entered.set()
                self.go_on.wait(20)
                self.left.set()

        monkeypatch.setattr(Window, "__enter__", held)


def test_a_write_is_tried_again_only_when_its_first_copy_can_no_longer_be_stored(
    rails: TwoRails, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldStore(monkeypatch)
    batch = rails.near.submit([rails.transfer(Op.WRITE, 100_000)], deadline_s=15)
    assert held.entered.wait(5)
    for proxy in rails.proxies:
        proxy.cut()
    for _ in range(200):  # a second attempt that does not wait would be over by now
        assert not batch.done
        held.left.wait(0.005)
    rails.memory.buffer[:100_000] = bytes(100_000)
    held.go_on.set()
    batch.wait(15)
    assert held.left.is_set()
    rails.memory.buffer[:100_000] = b"s" * 100_000  # the owner goes on
    rails.far.close()
    assert rails.memory.buffer[:100_000] == b"s" * 100_000


def test_a_write_whose_first_copy_cannot_be_ended_fails_instead_of_being_sent_again(
    rails: TwoRails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.wire.target._FENCE_S", 0.2)
    held = HeldStore(monkeypatch)
    batch = rails.near.submit([rails.transfer(Op.WRITE, 100_000)], deadline_s=3)
    assert held.entered.wait(5)
    for proxy in rails.proxies:
        proxy.cut()
    with pytest.raises(PeerLost):
        batch.wait(5)
    assert rails.memory.buffer[:100_000] == bytes(100_000)
    held.go_on.set()


# The same with links that the kernel takes down.


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)


@pytest.fixture
def linked_namespace() -> Iterator[str]:
    """A network namespace with two links to this one: 10.97.0.1–2 and 10.97.1.1–2."""
    name = f"moonserve-test-{os.getpid()}"
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2 for network namespaces")
    try:
        ip(f"netns add {name}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.strip()}")
    try:
        try:
            for rail in range(2):
                ip(f"link add mstest{rail} type veth peer name inner{rail} netns {name}")
                ip(f"addr add 10.97.{rail}.1/24 dev mstest{rail}")
                ip(f"link set mstest{rail} up")
                ip(f"-n {name} addr add 10.97.{rail}.2/24 dev inner{rail}")
                ip(f"-n {name} link set inner{rail} up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no virtual links can be made here: {error.stderr.strip()}")
        yield name
    finally:
        ip(f"netns delete {name}")
        for rail in range(2):  # connections that linger in the namespace would keep it, and them
            with suppress(subprocess.CalledProcessError):
                ip(f"link delete mstest{rail}")


@pytest.fixture
def far_host(linked_namespace: str) -> Iterator[PeerInProcess]:
    peer = PeerInProcess(
        "tcp",
        within=("ip", "netns", "exec", linked_namespace),
        rails="10.97.0.2,10.97.1.2",
    )
    yield peer
    peer.end()


@pytest.mark.slow
def test_a_link_that_goes_down_and_comes_up_again(
    far_host: PeerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.job._CONNECT_S", 0.2)
    options = TransferOptions(
        transports=("tcp",), rails=("10.97.0.1", "10.97.1.1"), slice_bytes=256 << 10
    )
    with TransferEngine(cluster_token=TOKEN, options=options) as near:
        address, segment_id = far_host.ask("address"), far_host.ask("allocate", NBYTES, 9, True)
        local = near.allocate(NBYTES)
        read = Transfer(Op.READ, local, 0, RemoteSegment(address, segment_id), 0, NBYTES)

        def run(deadline_s: float) -> float:
            local.buffer[:] = bytes(NBYTES)
            begin = time.monotonic()
            near.submit([read], deadline_s=deadline_s).wait(deadline_s + 5)
            assert local.buffer == b"\x09" * NBYTES
            return time.monotonic() - begin

        def bytes_over(rail: str) -> int:
            return sum(stats.read_bytes for stats in near.stats if stats.rail == rail)

        run(20)
        assert bytes_over("mstest0") > 0
        assert bytes_over("mstest1") > 0
        ip("link set mstest0 down")
        assert run(4) < 4
        for _ in range(10):
            run(4)
            if any(stats.incidents[Incident.REST] for stats in near.stats):
                break
        assert any(stats.incidents[Incident.FAILOVER] for stats in near.stats)
        ip("link set mstest0 up")
        before = bytes_over("mstest0")
        for _ in range(100):
            run(10)
            if bytes_over("mstest0") > before:
                break
            threading.Event().wait(0.1)
        assert bytes_over("mstest0") > before


def test_a_host_that_vanishes_without_a_word_is_lost_within_the_deadline(
    far_host: PeerInProcess,
) -> None:
    options = TransferOptions(transports=("tcp",), rails=("10.97.0.1", "10.97.1.1"))
    with TransferEngine(cluster_token=TOKEN, options=options) as near:
        address, segment_id = far_host.ask("address"), far_host.ask("allocate", 4096, 9, True)
        local = near.allocate(4096)
        read = Transfer(Op.READ, local, 0, RemoteSegment(address, segment_id), 0, 4096)
        near.submit([read], deadline_s=10).wait(10)
        for rail in range(2):
            ip(f"link set mstest{rail} down")
        begin = time.monotonic()
        with pytest.raises(PeerLost):
            near.submit([read], deadline_s=1).wait(10)
        assert time.monotonic() - begin < 2
