"""What Prometheus reads agrees with what engines did, to the byte, whatever went wrong."""

from __future__ import annotations

import threading

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from protocol.errors import InvalidRequest
from tests.patience import PATIENCE_S
from tests.transfer.conftest import Pair
from tests.transfer.fates import Fate, Fates
from transfer import Op, TransferEngine, TransferOptions
from transfer.metrics import TransferCollector
from transfer.stats import Incident, PathStats


class Readings:
    """An engine's metrics, summed over the labels that are not asked for."""

    def __init__(self, engine: TransferEngine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(TransferCollector(engine))

    def of(self, name: str, **labels: str) -> float:
        full = f"moonserve_transfer_{name}"
        found = [
            sample.value
            for family in self._registry.collect()
            for sample in family.samples
            if sample.name == full and labels.items() <= sample.labels.items()
        ]
        assert found or not labels, f"{full} has no {labels}"
        return sum(found)

    def text(self) -> str:
        return generate_latest(self._registry).decode()

    def require_quiet(self) -> None:
        assert self.of("bytes_in_flight") == 0
        assert self.of("slices_in_flight") == 0


def test_bytes_slices_and_seconds_are_counted_once(pair: Pair, transport: str) -> None:
    readings = Readings(pair.near)
    pair.run(pair.read(0, 0, 1000), pair.write(5000, 5000, 300))
    pair.near.run([pair.read(0, 0, 77)], deadline_s=PATIENCE_S)  # in the caller's thread
    (path,) = pair.near.stats
    labels = {"transport": transport, "rail": path.rail, "peer": path.peer}
    assert readings.of("bytes_total", op="read", **labels) == 1077
    assert readings.of("bytes_total", op="write", **labels) == 300
    assert readings.of("slices_total", **labels) == 3
    assert readings.of("seconds_count", **labels) == 3
    assert readings.of("seconds_bucket", le="+Inf", **labels) == 3
    assert 0 < readings.of("seconds_sum", **labels) < 30
    assert readings.of("connects_total", **labels) == 1
    assert readings.of("failures_total") == readings.of("retries_total") == 0
    readings.require_quiet()


def test_what_an_engine_holds_is_shown(pair: Pair) -> None:
    pair.run(pair.read(0, 0, 10))
    near, far = Readings(pair.near), Readings(pair.far)
    assert near.of("endpoints") == far.of("served_connections") == 1
    assert far.of("segments") == far.of("open_windows") == 1
    assert far.of("segment_bytes") == pair.memory.nbytes
    pair.far.close_window(pair.window_id)
    pair.near.forget(pair.far.address)
    assert far.of("open_windows") == 0


@pytest.mark.parametrize("transport", ["tcp"])
def test_a_damaged_slice_is_counted_and_sent_again(fates: Fates, pair: Pair) -> None:
    fates.orders["slice"] = [Fate.CORRUPT]
    readings = Readings(pair.near)
    pair.run(pair.write(0, 0, 4096))
    assert readings.of("integrity_failures_total") == readings.of("retries_total") == 1
    assert readings.of("bytes_total", op="write") == 4096
    assert readings.of("failures_total") == 0
    readings.require_quiet()


@pytest.mark.parametrize("transport", ["tcp"])
def test_a_refusal_is_a_failure(pair: Pair) -> None:
    readings = Readings(pair.near)
    with pytest.raises(InvalidRequest):
        pair.run(pair.write(0, 0, 10, 999))
    assert readings.of("failures_total") == 1
    readings.require_quiet()


def test_counting_is_exact_under_contention() -> None:
    stats = PathStats("tcp", "lo", "peer")

    def work() -> None:
        for _ in range(2000):
            stats.submitted(7)
            stats.taken()
            stats.count(Incident.RETRY)
            stats.taken(-1)
            stats.arrived(Op.WRITE, 7, 0.001)
            stats.withdrawn(7)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stats.written_bytes == 8 * 2000 * 7
    assert sum(stats.latency_counts) == stats.incidents[Incident.RETRY] == 8 * 2000
    assert stats.bytes_in_flight == stats.num_in_flight == 0


def test_the_text_that_prometheus_reads_has_the_agreed_names() -> None:
    options = TransferOptions(transports=("shm", "tcp"))
    with TransferEngine(cluster_token="t", options=options) as engine:
        text = Readings(engine).text()
    for name in (
        "bytes_total", "slices_total", "seconds", "retries_total", "failovers_total",
        "failures_total", "integrity_failures_total", "connects_total", "breaks_total",
        "rests_total", "slices_in_flight", "bytes_in_flight", "segments", "open_windows",
    ):  # fmt: skip
        assert f"# TYPE moonserve_transfer_{name} " in text
