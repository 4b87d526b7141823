"""WRITEs that the initiator stores itself under a lease: what it may write, and that nothing is stored after a close,
whatever the initiator's process does meanwhile."""

import itertools
import random
import signal
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from moonserve.protocol.errors import IntegrityError, InvalidRequest, StaleLease
from moonserve.transfer import RemoteSegment
from moonserve.transfer.shm.session import ShmSession
from tests.patience import until
from tests.transfer.conftest import MakePair, Pair
from tests.transfer.peer_process import PeerInProcess

TRANSPORTS = ["shm"]

MIB = 1 << 20
IN_LANE = 20 * MIB  # more than `run` carries in the caller's thread
ROUNDS = 10


@pytest.fixture
def leased(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A pair whose window is leased. A WRITE by message fails."""
    for _ in range(3):  # the first connects
        pair.run_inline(pair.write(0, 0, pair.memory.nbytes))
    monkeypatch.setattr(pair.near, "_submit", Mock(side_effect=AssertionError("by message")))
    monkeypatch.setattr(ShmSession, "carry_inline", Mock(side_effect=AssertionError("by message")))
    return pair


@pytest.mark.parametrize("in_lane", [False, True])
def test_a_leased_write_needs_no_message(leased: Pair, in_lane: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted all the same."""
    if in_lane:
        monkeypatch.undo()
        monkeypatch.setattr(ShmSession, "_request_write", Mock(side_effect=AssertionError("by message")))
    nbytes, (stats,) = leased.memory.nbytes, leased.near.stats
    before = stats.totals.bytes[1]
    leased.local.buffer[:] = random.Random(1).randbytes(nbytes)
    (leased.run if in_lane else leased.run_inline)(leased.write(0, 0, nbytes))
    assert leased.memory.buffer == leased.local.buffer
    assert stats.totals.bytes[1] == before + nbytes
    assert not leased.local.num_users


def test_a_store_of_the_lane_that_differs_is_an_error(leased: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (lane,) = next(iter(leased.near._peers.by_address.values()))._lanes.values()
    lane._session._copy_natively = lambda *_: -1  # type: ignore[union-attr]
    with pytest.raises(IntegrityError):
        leased.run(leased.write(0, 0, 1))


def test_a_lease_is_of_one_window_and_its_ranges(pair: Pair) -> None:
    pair.local.buffer[:] = b"l" * pair.local.nbytes
    pair.memory.buffer[:] = bytes(pair.memory.nbytes)
    ranges = [(0, 3), (10, 4), (14, 2), (30, 1)]
    window_id = pair.far.open_window(pair.memory, ranges)
    allowed = {at + i for at, length in ranges for i in range(length)}
    for start, length in itertools.product(range(33), range(1, 8)):
        transfer = pair.write(0, start, length, window_id)
        if allowed.issuperset(range(start, start + length)):
            pair.run_inline(transfer)
        else:
            with pytest.raises(InvalidRequest):
                pair.run_inline(transfer)
    assert {i for i, byte in enumerate(pair.memory.buffer) if byte} == allowed
    for _ in range(3):
        pair.run_inline(pair.write(0, 0, 10))
    pair.far.close_window(window_id)
    for at, length in ranges:
        with pytest.raises(StaleLease):
            pair.run_inline(pair.write(0, at, length, window_id))


def test_a_close_without_waiting_ends_the_lease(leased: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert leased.far.close_window_if_idle(leased.window_id)
    monkeypatch.undo()
    with pytest.raises(StaleLease):
        leased.run_inline(leased.write(0, 0, 1))


def test_signals_in_the_middle_of_stores_only_repeat_them(leased: Pair) -> None:
    """A signal handler makes the kernel restart the sequence that stores."""
    leased.local.buffer[:] = random.Random(2).randbytes(leased.local.nbytes)
    handled: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: handled.append(number))
    signal.setitimer(signal.ITIMER_REAL, 5e-4, 5e-4)
    try:
        for _ in range(300):
            leased.memory.buffer[:] = bytes(leased.memory.nbytes)
            leased.run_inline(leased.write(0, 0, leased.memory.nbytes))
            assert leased.memory.buffer == leased.local.buffer
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert handled


@pytest.fixture
def writer() -> Iterator[PeerInProcess]:
    peer = PeerInProcess("shm")
    yield peer
    peer.end()


@pytest.mark.parametrize(
    ("ending", "nbytes"),
    [("stopped", 4 * MIB), ("stopped", IN_LANE), ("stopped and killed", IN_LANE), ("killed", 4 * MIB)],
)
def test_nothing_is_stored_after_a_close_by_a_process_that_was_interrupted_in_the_middle(
    make_pair: MakePair, writer: PeerInProcess, ending: str, nbytes: int
) -> None:
    far = make_pair(4096).far
    memory, rng, num_mid_write = far.allocate(nbytes), random.Random(3), 0
    remote = RemoteSegment(far.address, memory.segment_id)
    for _ in range(ROUNDS if ending == "stopped" else 1):
        window_id = far.open_window(memory, [(0, memory.nbytes)])
        leases = far._state.windows._windows[window_id].leases
        writer.ask("write_until_refused", remote, window_id, memory.nbytes)
        until(lambda leases=leases: leases)  # type: ignore[misc]
        time.sleep(rng.uniform(0, 0.005))  # the writer stores all the time, so most stops are within a WRITE
        if ending == "killed":
            writer.process.kill()
        else:
            writer.stop()
            num_mid_write += not next(iter(leases)).end_if_idle()
        far.close_window(window_id)
        memory.buffer[:] = bytes(memory.nbytes)
        if ending == "stopped":
            writer.resume()
            assert writer.ask("refusal") == "StaleLease"
        else:
            writer.end()
        assert not bytes(memory.buffer).strip(b"\0")
    assert num_mid_write or ending != "stopped"
