"""How long writes may take, and which peers they are withdrawn from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from prefill_worker import landing as sending
from prefill_worker.landing import Sender
from protocol.errors import InvalidRequest
from protocol.request import Endpoint
from transfer import Batch, Op, RemoteSegment, ScatterTransfer, scatter
from transfer.config import Patience


@dataclass
class FakeEngine:
    """Ends batches when the test says so."""

    deadlines_s: list[float] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    is_closed: bool = False

    def submit(self, transfers: list[ScatterTransfer], *, deadline_s: float) -> Batch:
        if self.is_closed:
            raise InvalidRequest("closed")
        self.deadlines_s.append(deadline_s)
        self.batches.append(Batch(len(transfers), 1, lambda: None))
        return self.batches[-1]

    def forget(self, address: str) -> None:
        self.forgotten.append(address)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def sender(engine: FakeEngine) -> Sender:
    transfer: Any = engine
    return Sender(transfer, Patience(base_s=1.0, slowest_bytes_s=100.0))


def write(address: str, nbytes: int) -> ScatterTransfer:
    local: Any = None
    return ScatterTransfer(Op.WRITE, local, RemoteSegment(address, 1), scatter.rows((0, 0, nbytes)), 1)


def endpoint(epoch: int, address: str, name: str = "decode-0") -> Endpoint:
    return Endpoint(instance_id=name, epoch=epoch, rpc_address="", transfer_address=address, host="h")


def test_what_waits_before_a_write_to_the_same_peer_adds_to_its_time(engine: FakeEngine, sender: Sender) -> None:
    sender.submit(write("a", 100))
    sender.submit(write("a", 300))
    sender.submit(write("b", 200))
    engine.batches[0].settle_part({})
    sender.submit(write("a", 50))
    assert engine.deadlines_s == [2.0, 5.0, 3.0, 4.5]


def test_a_write_that_cannot_start_costs_the_next_nothing(engine: FakeEngine, sender: Sender) -> None:
    engine.is_closed = True
    with pytest.raises(InvalidRequest):
        sender.submit(write("a", 1000))
    engine.is_closed = False
    sender.submit(write("a", 100))
    assert engine.deadlines_s == [2.0]


def test_a_later_incarnation_means_that_the_earlier_one_is_dead(engine: FakeEngine, sender: Sender) -> None:
    for met in (endpoint(1, "old"), endpoint(1, "old"), endpoint(2, "new"), endpoint(1, "old")):
        sender.met(met)
    sender.met(endpoint(9, "other", "decode-1"))
    assert engine.forgotten == ["old"]


def test_only_so_many_peers_are_remembered(engine: FakeEngine, sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MAX_KNOWN", 2)
    for name in ("a", "b", "c"):
        sender.met(endpoint(1, name, name))
    for name in ("a", "c"):
        sender.met(endpoint(2, f"{name}-again", name))
    assert engine.forgotten == ["c"]
