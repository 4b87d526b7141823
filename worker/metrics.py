"""Prometheus metrics of prefill and decode workers: role, queues, blocks and counters.

Only the waits for blocks are measured here. All other figures are those of heartbeats and GetStatus.
"""

import contextlib
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily as _COUNTER
from prometheus_client.core import GaugeMetricFamily as _GAUGE
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from moonserve.protocol.pb import worker_pb2
from moonserve.protocol.process.metrics import LoopCollector, by_label
from moonserve.protocol.request import Role

# From an immediate grant to a pool that stays full for as long as callers wait.
_ALLOCATION_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip

_DRAFTS = {
    "num_draft_tokens": "Tokens guessed by speculative decoding, and computed.",
    "num_accepted_tokens": "Guessed tokens that were right.",
}
_TIERS = {"device": "device_hit_blocks", "store": "store_hit_blocks"}


def allocation_histogram() -> Histogram:
    """Returns a histogram of the waits of landings for blocks, to be registered while the worker has this role."""
    return Histogram(
        "moonserve_allocation_seconds",
        "From asking a decode worker for blocks to their grant.",
        registry=None,
        buckets=_ALLOCATION_BUCKETS,
    )


@contextlib.contextmanager
def registered_collectors(registry: CollectorRegistry, *collectors: Collector) -> Iterator[None]:
    """Registers collectors within the block, because a process that changes its role has others then."""
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
    """Returns a worker's collector, to be registered while it has this role. Must be called in its event loop."""

    def collect() -> Iterator[Metric]:
        now = status()
        load, counters = now.load, now.counters
        yield by_label(_GAUGE, "moonserve_role", "1 for the role that it has.", "role", {role.value: 1})
        yield _GAUGE("moonserve_draining", "1 = takes nothing new.", value=float(is_draining()))
        depth = _GAUGE("moonserve_queue_depth", "Sequences by what they wait for.", labels=("phase", "state"))
        depth.add_metric((role.value, "waiting"), load.num_waiting)
        depth.add_metric((role.value, "running"), load.num_running)
        yield depth
        text = "Prompt tokens not yet computed."
        yield _GAUGE("moonserve_queued_tokens", text, value=load.queued_tokens)
        yield _GAUGE("moonserve_context_tokens", "Of running sequences.", value=load.context_tokens)
        cached = min(now.cached_blocks, load.free_blocks)
        free = load.free_blocks - cached
        held, leased = load.held_blocks, load.leased_blocks
        blocks = {"held": held, "leased": leased, "cached": cached, "free": free}
        text = "Blocks of the worker's pool by what they are."
        yield by_label(_GAUGE, "moonserve_kv_blocks", text, "state", blocks)
        if role is Role.DECODE:
            steps = load.steps
            text = "Sequences of all decode steps: by steps, the batch."
            yield _COUNTER("moonserve_decode_steps", "Decode steps.", steps.num_steps)
            yield _COUNTER("moonserve_decode_step_seconds", "Time in decode steps.", steps.seconds)
            yield _COUNTER("moonserve_decode_step_sequences", text, steps.sequences)
            for name, text in _DRAFTS.items():
                yield _COUNTER(f"moonserve_spec_decode_{name}", text, counters.get(name, 0))
        failures = counters.get("integrity_failures", 0)
        yield _COUNTER("moonserve_integrity_failures", "Blocks dropped for a checksum.", failures)
        hits = {tier: counters.get(counter, 0) for tier, counter in _TIERS.items()}
        text = "Prefix blocks by where they were found."
        yield by_label(_COUNTER, "moonserve_tier_hit_blocks", text, "tier", hits)
        text = "What the worker counts about itself."
        yield by_label(_COUNTER, "moonserve_worker_events", text, "event", counters)

    return LoopCollector(collect)
