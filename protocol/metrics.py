"""Metrics of requests (gateway) and of placement decisions (conductor), fast metric types, and the HTTP exporter.

Names that existing vLLM and Mooncake dashboards read are kept; all others start with `moonserve_`. Units are seconds
and bytes. Other modules define further metrics: `protocol.worker_metrics` those of workers, and more than ten modules
in other packages those of what they implement.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from protocol.errors import ConfigError, error_classes
from protocol.request import FinishReason


class Count(Collector):
    """Counter without locks, for one thread that increments it tens of thousands of times a second.

    The locks of prometheus_client's counter took an eighth of what a streamed token costs the gateway. Any thread may
    read this counter at any time.
    """

    def __init__(self, name: str, text: str, labels: Mapping[str, str]) -> None:
        """`name` excludes the suffix `_total`."""
        self._name, self._text, self._labels = name, text, labels
        self._count = 0

    def add(self, count: int) -> None:
        self._count += count

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), self._count)
        yield family


class Durations(Collector):
    """Histogram without locks, for one writing thread. A concurrent reader may see a sum ahead of the buckets."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], bounds_s: Sequence[float]) -> None:
        """`bounds_s`: the upper bound of each bucket, ascending."""
        self._name, self._text, self._labels = name, text, labels
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)  # by bucket; the last one is unbounded
        self._sum_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += times
        self._sum_s += seconds * times

    def collect(self) -> Iterator[Metric]:
        bounds = map(floatToGoString, (*self._bounds_s, float("inf")))
        buckets = list(zip(bounds, accumulate(list(self._counts)), strict=True))
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), buckets, self._sum_s)
        yield family


_MODEL_LABELS = ("model_name", "engine")

# From a cached prefix on a GPU (milliseconds) to the 30 s of the Mooncake paper's TTFT objective, and beyond.
_TTFT_BUCKETS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip
_TBT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
_DURATION_BUCKETS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
_TOKEN_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000,
)  # fmt: skip
# From negligible phases to a request that only queued.
_PHASE_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
_ERROR_BUCKETS = (
    -30.0, -10.0, -3.0, -1.0, -0.3, -0.1, -0.03, -0.01, 0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Model:
    """Factory of metrics that carry the labels of one model."""

    registry: CollectorRegistry
    labels: tuple[str, str]

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, _MODEL_LABELS, registry=self.registry).labels(*self.labels)

    def counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _MODEL_LABELS, registry=self.registry).labels(*self.labels)

    def count(self, name: str, text: str) -> Count:
        made = Count(name, text, self._named())
        self.registry.register(made)
        return made

    def durations(self, name: str, text: str, buckets: tuple[float, ...]) -> Durations:
        made = Durations(name, text, self._named(), buckets)
        self.registry.register(made)
        return made

    def _named(self) -> dict[str, str]:
        return dict(zip(_MODEL_LABELS, self.labels, strict=True))

    def counter_by(self, label: str, name: str, text: str) -> Counter:
        """Makes a counter with a further label; the caller binds it together with the model's labels."""
        return Counter(name, text, (*_MODEL_LABELS, label), registry=self.registry)

    def histograms_by(
        self, label: str, values: Sequence[str], name: str, text: str, buckets: tuple[float, ...]
    ) -> dict[str, Histogram]:
        """Makes a histogram with a further label and returns it by that label's value."""
        labels = (*_MODEL_LABELS, label)
        made = Histogram(name, text, labels, registry=self.registry, buckets=buckets)
        return {value: made.labels(*self.labels, value) for value in values}

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, text, _MODEL_LABELS, registry=self.registry, buckets=buckets)
        return made.labels(*self.labels)


class RequestMetrics:
    """Request metrics of a gateway, with the model's labels bound. At most one instance per registry."""

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: str, phases: Sequence[str]) -> None:
        """`phases` are the phases into which `gateway.generation.timings` divides a request's time."""
        of = _Model(registry, (model_name, engine))
        gauge, counter, histogram = of.gauge, of.counter, of.histogram
        self.running = gauge("vllm:num_requests_running", "Requests that have their first token.")
        self.waiting = gauge("vllm:num_requests_waiting", "Requests waiting for their first token.")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of accepted requests.")
        self.generation_tokens = of.count("vllm:generation_tokens", "Tokens generated.")
        self.preemptions = counter("vllm:num_preemptions", "Sequences preempted on decode workers.")
        self.prefix_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self.prefix_hits = counter("vllm:prefix_cache_hits", "Prompt tokens whose KV was re-used.")
        self.ttft_s = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS)
        self.inter_token_s = of.durations("vllm:inter_token_latency_seconds", "Gaps between tokens.", _TBT_BUCKETS)
        self.e2e_s = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", _DURATION_BUCKETS)
        self.queue_s = histogram("vllm:request_queue_time_seconds", "Waiting on the prefill worker.", _DURATION_BUCKETS)
        self.prefill_s = histogram("vllm:request_prefill_time_seconds", "Loading and computing.", _DURATION_BUCKETS)
        self.decode_s = histogram("vllm:request_decode_time_seconds", "First token to last.", _DURATION_BUCKETS)
        self.prompt_length = histogram("vllm:request_prompt_tokens", "Prompt lengths.", _TOKEN_BUCKETS)
        self.generation_length = histogram("vllm:request_generation_tokens", "Output lengths.", _TOKEN_BUCKETS)
        self.success = of.counter_by("finished_reason", "vllm:request_success", "Requests that ended well.")
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of decode KV blocks in use, 0 to 1.")
        self.failures = of.counter_by(
            "code", "moonserve_request_failures", "Requests that ended in an error, by its code."
        )
        self.retries = counter("moonserve_request_retries", "Requests placed again after a loss.")
        self.phases = of.histograms_by(
            "phase",
            phases,
            "moonserve_request_phase_seconds",
            "Where the time of requests went.",
            _PHASE_BUCKETS,
        )
        self._labels = of.labels
        # All label values exist from the start, so that a rate over events that never happened is 0 and not missing.
        for reason in FinishReason:
            self.success.labels(*of.labels, reason.value)
        for code in error_classes():
            self.failures.labels(*of.labels, code)

    def succeeded(self, finished_reason: str) -> None:
        self.success.labels(*self._labels, finished_reason).inc()

    def failed(self, code: str) -> None:
        """`code` is that of a `protocol.errors` class."""
        self.failures.labels(*self._labels, code).inc()


class SchedulerMetrics:
    """Placement metrics of the conductor. At most one instance per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.placements = Counter("moonserve_placements", "Requests placed.", registry=registry)
        self.rejections = Counter("moonserve_rejections", "Requests not placed.", ("reason",), registry=registry)
        self.ttft_error_s = Histogram(
            "moonserve_ttft_prediction_error_seconds",
            "Predicted minus actual time to first token.",
            registry=registry,
            buckets=_ERROR_BUCKETS,
        )
        self.ttft_error_ratio = Gauge(
            "moonserve_conductor_ttft_error_ratio",
            "Size of recent prediction errors as a share of the actual TTFT, of the whole and of its terms.",
            ("term", "quantile"),
            registry=registry,
        )
        self.indexed_blocks = Gauge(
            "moonserve_indexed_blocks", "Block replicas in the prefix index.", registry=registry
        )
        self.objectives = Gauge(
            "moonserve_slo_seconds",
            "What placement must meet where requests do not say.",
            ("objective",),
            registry=registry,
        )
        self.instances = Gauge("moonserve_instances", "Live instances.", ("role",), registry=registry)


@contextlib.contextmanager
def exposed(registry: CollectorRegistry, host: str, port: int) -> Iterator[None]:
    """Serves the registry over HTTP in a thread within the block. Port 0 disables it.

    Raises ConfigError if it cannot listen on the port."""
    if not port:
        yield
        return
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"--metrics-port {port}: {error}") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
