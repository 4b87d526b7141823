"""Whatever the rails do, every batch ends once, in time and with the right bytes, and all counters return to zero."""

import contextlib
import itertools
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from moonserve.protocol.errors import IntegrityError, InvalidRequest, MoonserveError, PeerLost, StaleLease
from moonserve.transfer import Batch, Op, RemoteSegment, Transfer, TransferEngine, TransferOptions
from moonserve.transfer.memory.scatter import LOCAL
from moonserve.transfer.paths.rail_health import CooldownRule, RailHealth
from moonserve.transfer.transport_interface import Slice
from tests.patience import NEVER_S, PATIENCE_S, until
from tests.transfer.conftest import RAILS, TOKEN
from tests.transfer.fault_injection import FaultInjector, Outcome

PLACE = 8192
"""Bytes that belong to one batch, on each side."""
PLACES = 64
NUM_SEEDS = int(os.environ.get("MOONSERVE_STRESS_SEEDS", "4"))


@dataclass
class Piece:
    """Memory range of one batch, and the content that it writes there or must read from there."""

    start: int
    op: Op
    content: bytes
    batch: Batch
    deadline_s: float
    ends: list[Batch] = field(default_factory=list)
    has_ended: threading.Event = field(default_factory=threading.Event)

    def ended(self, batch: Batch) -> None:
        self.ends.append(batch)
        self.has_ended.set()


class Storm:
    """Two engines, two transports with up to five paths between them, and random batches drawn from a seed."""

    def __init__(self, seed: int, injector: FaultInjector) -> None:
        self.rng = random.Random(seed)
        self.fault_rate = self.rng.choice([0.05, 0.2, 0.5])
        self.injector = injector
        self._fate_rng = random.Random(seed + 1)
        injector.draw, injector.silent_connect_s, injector.on_carry = self.draw, 0.1, self.require_in_time
        options = TransferOptions(
            transports=tuple(self.rng.sample(["shm", "tcp"], 2)),
            rails=RAILS[: self.rng.randint(1, 2)],
            slice_bytes=1024,
            max_endpoints=self.rng.randint(1, 3),
        )
        self.near, self.far = (TransferEngine(cluster_token=TOKEN, options=options) for _ in range(2))
        self.near.start()
        self.far.start()
        self.local = self.near.allocate(PLACE * PLACES)
        self.memory = self.far.allocate(PLACE * PLACES)
        self.library = self.far.allocate(PLACE * PLACES, readable=True)
        self.library.buffer[:] = self.rng.randbytes(PLACE * PLACES)
        self.window_id = self.far.open_window(self.memory, [(0, PLACE * PLACES)])
        self.deadlines_s = [0.0] * PLACES
        """Deadline of the latest batch of each place."""
        self.is_in_time = True

    def draw(self, occasion: str) -> Outcome:
        rng = self._fate_rng
        if rng.random() >= self.fault_rate:
            return Outcome.ARRIVES
        if occasion != "slice":
            return rng.choice([Outcome.LOST, Outcome.SILENT])
        injector = [outcome for outcome in Outcome if outcome is not Outcome.ARRIVES]
        return rng.choice([*injector, Outcome.LATE, Outcome.LATE])

    def submit(self, place: int, deadlines_s: Sequence[float] = (0.05, 0.2, 0.5, 2.0)) -> Piece:
        op, start = self.rng.choice([Op.READ, Op.WRITE]), place * PLACE
        if op is Op.WRITE:
            there, window_id, content = self.memory, self.window_id, self.rng.randbytes(PLACE)
            self.local.buffer[start : start + PLACE] = content
        else:
            there, window_id, content = self.library, None, bytes(self.library.buffer[start : start + PLACE])
        remote = RemoteSegment(self.far.address, there.segment_id)
        cuts = sorted({0, PLACE, *(self.rng.randrange(PLACE) for _ in range(3))})
        transfers = [
            Transfer(op, self.local, start + at, remote, start + at, end - at, window_id)
            for at, end in itertools.pairwise(cuts)
        ]
        self.deadlines_s[place] = deadline_s = self.rng.choice(deadlines_s)
        batch = self.near.submit(transfers, deadline_s=deadline_s)
        piece = Piece(start, op, content, batch, deadline_s)
        batch.add_done_callback(piece.ended)
        return piece

    def require_in_time(self, part: Slice, gives_up_at: float) -> None:
        """Checks that a slice is not carried beyond its batch's deadline, whatever else the session carries."""
        if part.local is self.local:
            place = int(part.rows[0, LOCAL]) // PLACE
            self.is_in_time &= gives_up_at <= time.monotonic() + self.deadlines_s[place]

    def disturb(self) -> None:
        """Does at random what callers and targets may do during a batch."""
        match self.rng.randrange(7):
            case 0:
                self.injector.store_late_data()
            case 1:
                self.near.forget(self.far.address)
            case 2:
                threading.Thread(target=self.look).start()
            case 3:
                threading.Thread(target=self.run_small).start()

    def look(self) -> None:
        with contextlib.suppress(PeerLost):
            self.near.open(self.far.address, deadline_s=0.3)

    def run_small(self) -> None:
        remote = RemoteSegment(self.far.address, self.library.segment_id)
        scratch = self.near.allocate(512)
        try:
            self.near.run([Transfer(Op.READ, scratch, 0, remote, 0, 512)], deadline_s=0.5)
        except MoonserveError:
            pass
        else:
            assert scratch.buffer == self.library.buffer[:512]
        self.near.deregister(scratch)

    def check(self, piece: Piece) -> None:
        assert piece.has_ended.wait(PATIENCE_S)
        assert piece.ends == [piece.batch]
        errors = [error for error in piece.batch.errors if error is not None]
        assert all(isinstance(error, PeerLost | StaleLease | IntegrityError) for error in errors)
        if not errors:
            side = self.memory if piece.op is Op.WRITE else self.local
            assert side.buffer[piece.start : piece.start + PLACE] == piece.content

    def require_balance(self) -> None:
        """Requires that nothing is in flight according to any counter."""
        for peer in self.near._peers.by_address.values():
            peer._selector.validate()
            assert not any(each.in_flight_bytes for each in peer._selector._states.values())
        assert all((path.totals.num_in_flight, path.totals.bytes_in_flight) == (0, 0) for path in self.near.stats)
        assert self.local.num_users == 0


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_every_batch_ends_once_in_time_with_the_right_bytes(
    seed: int, injector: FaultInjector, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = CooldownRule(first_cooldown_s=0.1, max_cooldown_s=0.4, same_incident_s=0.005)
    monkeypatch.setattr("moonserve.transfer.paths.failover.RailHealth", lambda: RailHealth(rule))
    monkeypatch.setattr("moonserve.transfer.paths.lane.IDLE_S", 0.05)
    # Without injected faults, nothing fails because the machine is slow.
    for patience in ("paths.lane_queue._CONNECT_S", "paths.lane._FENCE_S", "tcp.target._FENCE_S"):
        monkeypatch.setattr(f"moonserve.transfer.{patience}", NEVER_S)
    monkeypatch.setattr("moonserve.transfer.tcp.session._SILENCE_S", NEVER_S)
    before = set(threading.enumerate())  # includes threads that keep running, for example gRPC's
    storm = Storm(seed, injector)
    # A place is reused only after its previous batch has ended, since the source of a batch must not change.
    for _ in range(6):
        begun = []
        for place in storm.rng.sample(range(PLACES), 12):
            begun.append(storm.submit(place))
            storm.disturb()
        for piece in begun:
            storm.check(piece)
    storm.fault_rate = 0.0
    last = [storm.submit(place, (0.05, 0.2, PATIENCE_S)) for place in range(PLACES)]
    for piece in last:
        if piece.deadline_s == PATIENCE_S:
            piece.batch.wait(PATIENCE_S)
        assert piece.has_ended.wait(PATIENCE_S)
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("Thread-"):
            thread.join(PATIENCE_S)
    until(
        lambda: all(lane.idle for peer in storm.near._peers.by_address.values() for lane in list(peer._lanes.values()))
    )
    assert storm.is_in_time
    storm.require_balance()
    # What the owner stores where a WRITE has succeeded stays: no earlier attempt arrives late.
    views = [
        storm.memory.buffer[piece.start : piece.start + PLACE]
        for piece in last
        if piece.op is Op.WRITE and not any(piece.batch.errors)
    ]
    for view in views:
        view[:] = b"s" * PLACE
    storm.injector.store_late_data()
    assert all(view == b"s" * PLACE for view in views)
    storm.near.close()
    storm.far.close()
    assert not storm.injector.open_sessions
    assert not len(storm.far._state.served)
    with pytest.raises(InvalidRequest):
        storm.submit(0)
    assert {thread.name for thread in set(threading.enumerate()) - before} == set()
