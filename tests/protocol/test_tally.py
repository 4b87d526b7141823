"""Tallies tell what prometheus_client's own metrics tell of the same observations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from protocol.metrics import Count, Durations

BOUNDS = (0.001, 0.0025, 0.5, 5.0)
LABELS = {"model_name": "demo", "engine": 'a"b'}


def page(registry: CollectorRegistry) -> list[str]:
    """Without the instants at which metrics were made."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@given(st.lists(st.tuples(st.sampled_from((0.0, *BOUNDS, 0.002, 7.0)) | st.floats(0, 10), st.integers(0, 3))))
def test_they_tell_the_same(observed: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    count, durations = Count("c", "counts", LABELS), Durations("d_s", "lasts", LABELS, BOUNDS)
    ours.register(count)
    ours.register(durations)
    counter = Counter("c", "counts", tuple(LABELS), registry=theirs).labels(**LABELS)
    histogram = Histogram("d_s", "lasts", tuple(LABELS), registry=theirs, buckets=BOUNDS)
    for seconds, times in observed:
        durations.add(seconds, times)
        count.add(times)
        counter.inc(times)
        for _ in range(times):
            histogram.labels(**LABELS).observe(seconds)
    histogram.labels(**LABELS)  # also where nothing was observed
    mine, others = page(ours), page(theirs)
    assert [line.rsplit(" ", 1)[0] for line in mine] == [x.rsplit(" ", 1)[0] for x in others]
    for one, other in zip(mine, others, strict=True):
        if not one.startswith("#"):
            a, b = float(one.rsplit(" ", 1)[1]), float(other.rsplit(" ", 1)[1])
            assert abs(a - b) <= 1e-9 * max(1.0, b)
