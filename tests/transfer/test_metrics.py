"""Prometheus metrics agree with the engine's work to the byte, whatever fails. The bandwidth between two engines is
measured over periods in flight, without pauses, mixtures of operations or round trips."""

import pytest
from prometheus_client import CollectorRegistry

from moonserve.protocol.errors import InvalidRequest
from moonserve.transfer import Op, TransferEngine
from moonserve.transfer.metrics import TransferCollector, copy_bytes_per_s
from moonserve.transfer.paths.path_selection import MEASURED_FROM as MUCH
from moonserve.transfer.paths.traffic_stats import BUCKETS_S, BandwidthMeter, BandwidthTotals, PathStats
from tests.clock import Clock
from tests.transfer.conftest import Pair
from tests.transfer.fault_injection import FaultInjector, Outcome


class Readings:
    """Metrics of an engine, summed over the labels that are not given."""

    def __init__(self, engine: TransferEngine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(TransferCollector(engine))

    def of(self, name: str, **labels: str) -> float:
        full = f"moonserve_transfer_{name}"
        samples = [sample for family in self._registry.collect() for sample in family.samples if sample.name == full]
        found = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
        assert found or not labels, f"{full} has no {labels}"
        return sum(found)


def test_bytes_slices_seconds_and_incidents_are_counted_once(
    injector: FaultInjector, pair: Pair, transport: str
) -> None:
    readings = Readings(pair.near)
    pair.run(pair.read(0, 0, 1000), pair.write(5000, 5000, 300))
    (path,) = pair.near.stats
    labels = {"transport": transport, "rail": path.rail, "peer": path.peer}
    assert readings.of("bytes_total", op="read", **labels) == 1000
    assert readings.of("bytes_total", op="write", **labels) == 300
    for name in ("slices_total", "seconds_count"):
        assert readings.of(name, **labels) == 2
    assert readings.of("seconds_bucket", le="+Inf", **labels) == 2
    assert 0 < readings.of("seconds_sum", **labels) < 30
    assert readings.of("connects_total", **labels) == 1
    assert readings.of("failures_total") == readings.of("retries_total") == 0
    pair.run_inline(pair.read(0, 0, 77))
    assert readings.of("bytes_total", op="read") == 1077
    assert readings.of("slices_total") == readings.of("seconds_count") == 3
    injector.orders["slice"] = [Outcome.CORRUPT]
    pair.run(pair.write(0, 0, 4096))
    assert readings.of("integrity_failures_total") == readings.of("retries_total") == 1
    assert readings.of("bytes_total", op="write") == 4396
    assert readings.of("failures_total") == 0
    with pytest.raises(InvalidRequest):
        pair.run(pair.write(0, 0, 10, 999))
    assert readings.of("failures_total") == 1
    assert readings.of("bytes_in_flight") == readings.of("slices_in_flight") == 0


def test_usage_shows_segments_windows_and_connections(pair: Pair) -> None:
    pair.run(pair.read(0, 0, 10))
    near, far = Readings(pair.near), Readings(pair.far)
    assert near.of("endpoints") == far.of("served_connections") == 1
    assert far.of("segments") == far.of("open_windows") == 1
    assert far.of("segment_bytes") == pair.memory.nbytes
    pair.far.close_window(pair.window_id)
    pair.near.forget(pair.far.address)
    assert far.of("open_windows") == 0


def path_with(clock: Clock) -> PathStats:
    return PathStats("shm", "shm", "peer", BandwidthMeter(), clock)


def under_way(path: PathStats, clock: Clock, *moves: tuple[Op, int], seconds: float = 0.5) -> BandwidthTotals:
    """Moves the bytes at the same time. Returns what the meter has seen."""
    for _, nbytes in moves:
        path.submitted(nbytes)
    clock.now += seconds
    for op, nbytes in moves:
        path.arrived(op, nbytes, seconds)
        path.left(nbytes)
    return path.meter.totals()


def test_overlapping_transfers_count_their_time_once_and_pauses_do_not_count() -> None:
    write, read, clock = (Op.WRITE, MUCH), (Op.READ, MUCH), Clock()
    assert under_way(path_with(clock), clock, write, write) == BandwidthTotals(written_bytes=2 * MUCH, written_s=0.5)
    assert under_way(path_with(clock), clock, (Op.READ, MUCH - 1)) == BandwidthTotals()
    assert under_way(path_with(clock), clock, write, read) == BandwidthTotals()
    path = path_with(clock)
    for _ in range(3):
        under_way(path, clock, read)
        clock.now += 100.0
    path.arrived(Op.READ, MUCH, 0.25)  # a read in the caller's thread reports its own time
    path.arrived(Op.READ, MUCH - 1, 0.25)
    assert path.meter.totals() == BandwidthTotals(read_bytes=4 * MUCH, read_s=1.75)


def test_continuous_traffic_is_measured_and_a_slice_counts_in_the_bucket_of_its_time() -> None:
    path = path_with(clock := Clock())
    path.submitted(MUCH)
    for _ in range(10):
        under_way(path, clock, (Op.READ, MUCH))
    assert 8 * MUCH <= path.meter.totals().read_bytes <= 10 * MUCH
    assert path.meter.totals().read_bytes / path.meter.totals().read_s == MUCH / 0.5
    path = path_with(clock)
    for bound in (*BUCKETS_S, 100.0):
        path.arrived(Op.READ, 1, bound)
    assert list(path.totals.counts) == [1] * (len(BUCKETS_S) + 1)


def test_measuring_the_copy_rate_leaves_the_memory_unchanged() -> None:
    memory = bytearray(range(256)) * 64
    assert copy_bytes_per_s(memoryview(memory)) > 0
    assert memory == bytearray(range(256)) * 64
