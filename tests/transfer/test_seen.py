"""What is measured of the bandwidth between two engines: periods under way, not pauses, mixtures or round trips."""

from __future__ import annotations

from transfer.base import Op
from transfer.metrics import local_bytes_per_s
from transfer.stats import MEASURED_FROM, PeerMeter, Seen

MUCH = MEASURED_FROM


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def moved(meter: PeerMeter, clock: Clock, op: Op, nbytes: int, seconds: float) -> None:
    meter.submitted(nbytes)
    clock.now += seconds
    meter.arrived(op, nbytes, seconds)
    meter.withdrawn(nbytes)


def together(*moves: tuple[Op, int], seconds: float = 0.5) -> Seen:
    """What is under way at the same time."""
    clock = Clock()
    meter = PeerMeter(clock)
    for _, nbytes in moves:
        meter.submitted(nbytes)
    clock.now += seconds
    for op, nbytes in moves:
        meter.arrived(op, nbytes, seconds)
        meter.withdrawn(nbytes)
    return meter.seen()


def test_what_is_under_way_together_counts_its_time_once_and_pauses_do_not_count() -> None:
    write = (Op.WRITE, MUCH)
    assert together(write, write) == Seen(written_bytes=2 * MUCH, written_s=0.5)
    assert together((Op.READ, MUCH - 1)) == together(write, (Op.READ, MUCH)) == Seen()
    clock = Clock()
    meter = PeerMeter(clock)
    for _ in range(3):
        moved(meter, clock, Op.READ, MUCH, 0.5)
        clock.now += 100.0
    assert meter.seen() == Seen(read_bytes=3 * MUCH, read_s=1.5)


def test_what_never_pauses_is_measured_all_the_same() -> None:
    clock = Clock()
    meter = PeerMeter(clock)
    meter.submitted(MUCH)
    for _ in range(10):
        moved(meter, clock, Op.READ, MUCH, 0.5)
    assert 8 * MUCH <= meter.seen().read_bytes <= 10 * MUCH
    assert meter.seen().read_bytes / meter.seen().read_s == MUCH / 0.5


def test_a_read_in_the_callers_thread_counts_with_its_own_time() -> None:
    meter = PeerMeter(Clock())
    meter.arrived(Op.READ, MUCH, 0.25)
    meter.arrived(Op.READ, MUCH - 1, 0.25)
    assert meter.seen() == Seen(read_bytes=MUCH, read_s=0.25)


def test_the_local_rate_leaves_the_memory_as_it_is() -> None:
    memory = bytearray(range(256)) * 64
    assert local_bytes_per_s(memoryview(memory)) > 0
    assert memory == bytearray(range(256)) * 64
