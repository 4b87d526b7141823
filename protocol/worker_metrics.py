"""What Prometheus reads of a prefill or decode worker: its role, its queues, its blocks and its counters.

Nothing is counted here but the waits for blocks: the figures are those that heartbeats and GetStatus tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.ids import Role
from protocol.pb import conductor_pb2, worker_pb2
from protocol.scraping import LoopCollector

# From a grant at once to a pool that stays full for as long as callers wait.
_ALLOCATION_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip

_TIERS = {"device": "device_hit_blocks", "store": "store_hit_blocks"}


def allocation_histogram() -> Histogram:
    """How long landings wait for blocks; to be registered for as long as the worker has this role."""
    return Histogram(
        "moonserve_allocation_seconds",
        "From asking a decode worker for blocks to their grant.",
        registry=None,
        buckets=_ALLOCATION_BUCKETS,
    )


@contextlib.contextmanager
def registered(registry: CollectorRegistry, *collectors: Collector) -> Iterator[None]:
    """Scrapes see them within the block: a process that changes its role has others then."""
    for collector in collectors:
        registry.register(collector)
    try:
        yield
    finally:
        for collector in collectors:
            registry.unregister(collector)


def worker_collector(
    role: Role, status: Callable[[], worker_pb2.WorkerStatus], is_draining: Callable[[], bool]
) -> LoopCollector:
    """To be registered for as long as the worker has this role; made in its event loop."""

    def collect() -> Iterator[Metric]:
        now = status()
        yield _one("moonserve_role", "1 for the role that it has.", ("role",), (role.value,), 1)
        yield GaugeMetricFamily(
            "moonserve_draining", "1 = takes nothing new.", value=float(is_draining())
        )
        yield from _queues(role, now.load)
        yield _blocks(now)
        if role is Role.DECODE:
            yield from _steps(now.load.steps)
        yield from _counters(now.counters)

    return LoopCollector(collect)


def _queues(role: Role, load: conductor_pb2.Load) -> Iterator[Metric]:
    depth = GaugeMetricFamily(
        "moonserve_queue_depth", "Sequences by what they wait for.", labels=("phase", "state")
    )
    depth.add_metric((role.value, "waiting"), load.num_waiting)
    depth.add_metric((role.value, "running"), load.num_running)
    yield depth
    yield GaugeMetricFamily(
        "moonserve_queued_tokens", "Prompt tokens not yet computed.", value=load.queued_tokens
    )
    yield GaugeMetricFamily(
        "moonserve_context_tokens", "Of running sequences.", value=load.context_tokens
    )


def _blocks(status: worker_pb2.WorkerStatus) -> Metric:
    load = status.load
    blocks = GaugeMetricFamily(
        "moonserve_kv_blocks", "Blocks of the worker's pool by what they are.", labels=("state",)
    )
    cached = min(status.cached_blocks, load.free_blocks)
    for state, count in (
        ("held", load.held_blocks),
        ("leased", load.leased_blocks),
        ("cached", cached),
        ("free", load.free_blocks - cached),
    ):
        blocks.add_metric((state,), count)
    return blocks


def _steps(steps: conductor_pb2.Steps) -> Iterator[Metric]:
    for name, text, value in (
        ("moonserve_decode_steps", "Decode steps.", steps.num_steps),
        ("moonserve_decode_step_seconds", "Time in decode steps.", steps.seconds),
        (
            "moonserve_decode_step_sequences",
            "Sequences of all decode steps: by steps, the batch.",
            steps.sequences,
        ),
    ):
        yield CounterMetricFamily(name, text, value)


def _counters(counters: Mapping[str, int]) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "moonserve_integrity_failures",
        "Blocks dropped for a checksum.",
        counters.get("integrity_failures", 0),
    )
    hits = CounterMetricFamily(
        "moonserve_tier_hit_blocks", "Prefix blocks by where they were found.", labels=("tier",)
    )
    for tier, counter in _TIERS.items():
        hits.add_metric((tier,), counters.get(counter, 0))
    yield hits
    events = CounterMetricFamily(
        "moonserve_worker_events", "What the worker counts about itself.", labels=("event",)
    )
    for name, count in counters.items():
        events.add_metric((name,), count)
    yield events


def _one(
    name: str, text: str, labels: tuple[str, ...], values: tuple[str, ...], value: float
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    family.add_metric(values, value)
    return family
