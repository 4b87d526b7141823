"""Whatever the rails do, every batch ends once, in time, with the right bytes, and the books balance."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from protocol.errors import IntegrityError, InvalidRequest, MoonserveError, PeerLost, StaleLease
from tests.patience import NEVER_S, PATIENCE_S
from tests.transfer.conftest import RAILS, TOKEN
from tests.transfer.fates import Fate, Fates
from transfer import Batch, Op, RemoteSegment, Transfer, TransferEngine, TransferOptions
from transfer.base import Slice
from transfer.paths.health import RailHealth, RestRule
from transfer.scatter import LOCAL

PLACE = 8192
"""Bytes that belong to one batch, on either side."""
PLACES = 64
NUM_SEEDS = int(os.environ.get("MOONSERVE_STRESS_SEEDS", "4"))


@dataclass
class Weather:
    """Fates drawn by a seed; `calm` ends it."""

    rng: random.Random
    trouble: float
    calm: bool = False

    def __call__(self, occasion: str) -> Fate:
        if self.calm or self.rng.random() >= self.trouble:
            return Fate.ARRIVES
        if occasion != "slice":
            return self.rng.choice([Fate.LOST, Fate.SILENT])
        fates = [fate for fate in Fate if fate is not Fate.ARRIVES]
        return self.rng.choice([*fates, Fate.LATE, Fate.LATE])


@dataclass
class Piece:
    """One batch's place: what it writes there, or what it must read from there."""

    place: int
    op: Op
    content: bytes
    batch: Batch
    deadline_s: float
    num_ends: int = 0
    has_ended: threading.Event = field(default_factory=threading.Event)

    def ended(self, batch: Batch) -> None:
        self.num_ends += 1
        self.has_ended.set()


class Storm:
    """Two engines, two transports with up to five paths between them, and batches that come and go."""

    def __init__(self, seed: int, fates: Fates) -> None:
        self.rng = random.Random(seed)
        self.weather = Weather(random.Random(seed + 1), trouble=self.rng.choice([0.05, 0.2, 0.5]))
        self.fates = fates
        fates.draw, fates.silent_connect_s = self.weather, 0.1
        options = TransferOptions(
            transports=tuple(self.rng.sample(["shm", "tcp"], 2)),
            rails=RAILS[: self.rng.randint(1, 2)],
            slice_bytes=1024,
            max_endpoints=self.rng.randint(1, 3),
        )
        self.near = TransferEngine(cluster_token=TOKEN, options=options)
        self.far = TransferEngine(cluster_token=TOKEN, options=options)
        self.near.start()
        self.far.start()
        self.local = self.near.allocate(PLACE * PLACES)
        self.memory = self.far.allocate(PLACE * PLACES)
        self.library = self.far.allocate(PLACE * PLACES, readable=True)
        self.library.buffer[:] = self.rng.randbytes(PLACE * PLACES)
        self.window_id = self.far.open_window(self.memory, [(0, PLACE * PLACES)])
        self.pieces: list[Piece] = []
        self.deadlines_s = [0.0] * PLACES
        """Of the latest batch of each place."""
        self.is_in_time = True
        fates.on_carry = self.require_in_time

    def submit(self, place: int, deadlines_s: Sequence[float] = (0.05, 0.2, 0.5, 2.0)) -> Piece:
        op, start = self.rng.choice([Op.READ, Op.WRITE]), place * PLACE
        if op is Op.WRITE:
            remote = RemoteSegment(self.far.address, self.memory.segment_id)
            content = self.rng.randbytes(PLACE)
            self.local.buffer[start : start + PLACE] = content
        else:
            remote = RemoteSegment(self.far.address, self.library.segment_id)
            content = bytes(self.library.buffer[start : start + PLACE])
        window_id = self.window_id if op is Op.WRITE else None
        cuts = sorted({0, PLACE, *(self.rng.randrange(PLACE) for _ in range(3))})
        transfers = [
            Transfer(op, self.local, start + at, remote, start + at, end - at, window_id)
            for at, end in itertools.pairwise(cuts)
        ]
        self.deadlines_s[place] = deadline_s = self.rng.choice(deadlines_s)
        batch = self.near.submit(transfers, deadline_s=deadline_s)
        piece = Piece(place, op, content, batch, deadline_s)
        batch.add_done_callback(piece.ended)
        return piece

    def require_in_time(self, part: Slice, gives_up_at: float) -> None:
        """Nothing is carried longer than its own batch may take, whatever else the session carries."""
        if part.local is self.local:
            place = int(part.rows[0, LOCAL]) // PLACE
            self.is_in_time &= gives_up_at <= time.monotonic() + self.deadlines_s[place]

    def disturb(self) -> None:
        """What callers and targets do meanwhile."""
        match self.rng.randrange(7):
            case 0:
                self.fates.store_what_is_late()
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
        assert piece.num_ends == 1
        errors = [error for error in piece.batch.errors if error is not None]
        for error in errors:
            assert isinstance(error, PeerLost | StaleLease | IntegrityError)
        if not errors:
            side = self.memory if piece.op is Op.WRITE else self.local
            start = piece.place * PLACE
            assert side.buffer[start : start + PLACE] == piece.content

    def balance(self) -> None:
        """Nothing is under way, and every account says so."""
        for peer in self.near._peers.met.values():
            peer._chooser.validate()
            assert not any(each.in_flight_bytes for each in peer._chooser._tracks.values())
            for lane in peer._lanes.values():
                assert lane.idle
        for stats in self.near.stats:
            assert (stats.num_in_flight, stats.bytes_in_flight) == (0, 0)
        assert self.local.num_users == 0


@pytest.fixture
def fast_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RestRule(first_rest_s=0.1, longest_rest_s=0.4, same_incident_s=0.005)
    monkeypatch.setattr("transfer.peer.RailHealth", lambda: RailHealth(rule))
    monkeypatch.setattr("transfer.lane.IDLE_S", 0.05)
    # In calm weather nothing fails because the machine is slow.
    for patience in ("waiting._CONNECT_S", "lane._FENCE_S", "tcp.target._FENCE_S"):
        monkeypatch.setattr(f"transfer.{patience}", NEVER_S)
    monkeypatch.setattr("transfer.tcp.session._SILENCE_S", NEVER_S)


@pytest.mark.usefixtures("fast_rests")
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_every_batch_ends_once_in_time_and_right(seed: int, fates: Fates) -> None:
    before = set(threading.enumerate())
    storm = Storm(seed, fates)
    for _ in range(3):
        rounds = [storm.rng.sample(range(PLACES), 12) for _ in range(2)]
        # A place is used again only after the batch before has ended: its source must not change.
        for places in rounds:
            begun = []
            for place in places:
                begun.append(storm.submit(place))
                storm.pieces.append(begun[-1])
                storm.disturb()
            for piece in begun:
                assert piece.has_ended.wait(PATIENCE_S)
                storm.check(piece)
    storm.weather.calm = True
    last = [storm.submit(place, (0.05, 0.2, PATIENCE_S)) for place in range(PLACES)]
    for piece in last:
        if piece.deadline_s == PATIENCE_S:
            piece.batch.wait(PATIENCE_S)
    finish(storm, last, before)
    assert {thread.name for thread in set(threading.enumerate()) - before} == set()


def finish(storm: Storm, last: list[Piece], before: set[threading.Thread]) -> None:
    """`before`: threads of others, gRPC's for one, that go on."""
    for piece in last:
        assert piece.has_ended.wait(PATIENCE_S)
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("Thread-"):
            thread.join(PATIENCE_S)
    for peer in [*storm.near._peers.met.values()]:
        for lane in list(peer._lanes.values()):
            for _ in range(20_000):
                if lane.idle:
                    break
                threading.Event().wait(0.005)
    assert storm.is_in_time
    storm.balance()
    # What the owner puts where a WRITE succeeded stays: nothing of an earlier attempt comes late.
    written = [piece for piece in last if piece.op is Op.WRITE and not any(piece.batch.errors)]
    for piece in written:
        start = piece.place * PLACE
        storm.memory.buffer[start : start + PLACE] = b"s" * PLACE
    storm.fates.store_what_is_late()
    for piece in written:
        start = piece.place * PLACE
        assert storm.memory.buffer[start : start + PLACE] == b"s" * PLACE
    storm.near.close()
    storm.far.close()
    assert not storm.fates.open_sessions
    assert not len(storm.far._hosted.served)
    with pytest.raises(InvalidRequest):
        storm.submit(0)
