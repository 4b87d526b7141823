"""What Prometheus reads agrees with what engines did, to the byte, whatever went wrong."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from protocol.errors import InvalidRequest
from tests.patience import PATIENCE_S
from tests.transfer.conftest import Pair
from tests.transfer.fates import Fate, Fates
from transfer import TransferEngine
from transfer.metrics import TransferCollector


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
