"""Metrics of requests: series for Prometheus since the start (`RequestMetrics`; names that vLLM dashboards read are
kept), and figures of the last minute for people (`RecentFigures`, bounded; `now` is in monotonic seconds).
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as LabelledCounter

from moonserve.protocol.errors import error_classes
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.latency import percentile
from moonserve.protocol.pb import conductor_pb2
from moonserve.protocol.process.metrics import FastCounter, FastHistogram
from moonserve.protocol.request import FinishReason, Placement, Role
from moonserve.protocol.rpc.wire import role_from_wire

# From a cached prefix on a GPU (milliseconds) to the 30 s of the Mooncake paper's TTFT objective, and beyond.
_TTFTS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip
_GAPS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
_DURATIONS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
_TOKENS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000,
)  # fmt: skip
# From negligible phases to a request that only queued.
_PHASES = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip

WINDOW_S = 60.0
GATEWAY = "gateway"  # name of this gateway in flows
_MAX_SAMPLES = 4096
_MAX_PREFIXES = 512
_NUM_LATEST = 12
_NUM_TIMED = 256
_SHOWN_PREFIXES = 8
_HALF_LIFE_S = 60.0  # of a prefix's heat
_MAX_FLOWS = 1024
_EXCERPT_TOKENS = 24  # of a prefix's beginning, and of its end
# Cached tokens by where they were: in the worker's own cache, in a store of its host, in another store.
_CACHES = ("device_tokens", "host_store_tokens", "remote_store_tokens")
# vLLM's names for where the KV of prompt tokens came from.
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_TOTALS = ("requests", "finished", "output_tokens", "prompt_tokens", "cached_tokens", *_CACHES)


@dataclass(frozen=True, slots=True)
class _Model:
    """Factory of metrics that carry the labels of one model."""

    registry: CollectorRegistry
    labels: dict[str, str]

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, tuple(self.labels), registry=self.registry).labels(**self.labels)

    def counter(self, name: str, text: str) -> FastCounter:
        made = FastCounter(name, text, self.labels)
        self.registry.register(made)
        return made

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> FastHistogram:
        made = FastHistogram(name, text, self.labels, buckets)
        self.registry.register(made)
        return made

    def counters_by(self, label: str, values: Iterable[str], name: str, text: str) -> dict[str, LabelledCounter]:
        """Makes a counter with a further label and returns it by that label's value. All values exist from the start,
        so that a rate over events that never happened is 0 and not missing."""
        made = LabelledCounter(name, text, (*self.labels, label), registry=self.registry)
        return {value: made.labels(**self.labels, **{label: value}) for value in values}


class RequestMetrics:
    """Request metrics of a gateway, with the model's labels bound. At most one instance per registry."""

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: str, phases: Sequence[str]) -> None:
        """`phases` are the phases into which `gateway.generation.request_timing` divides a request's time."""
        of = _Model(registry, {"model_name": model_name, "engine": engine})
        gauge, counter, histogram = of.gauge, of.counter, of.histogram
        self.running = gauge("vllm:num_requests_running", "Requests that have their first token.")
        self.waiting = gauge("vllm:num_requests_waiting", "Requests waiting for their first token.")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of accepted requests.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self.preemptions = counter("vllm:num_preemptions", "Sequences preempted on decode workers.")
        self._own_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in a worker's own cache.")
        self._own_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in a worker's own cache.")
        text = "Prompt tokens that were not in the worker's own cache, looked up in stores."
        self._store_queries = counter("vllm:external_prefix_cache_queries", text)
        self._store_hits = counter("vllm:external_prefix_cache_hits", "Prompt tokens read from stores.")
        self._cached = counter("vllm:prompt_tokens_cached", "Prompt tokens from the worker's own cache or a store.")
        text = "Prompt tokens by where their KV came from."
        self._by_source = of.counters_by("source", _SOURCES, "vllm:prompt_tokens_by_source", text)
        self._computed = histogram("vllm:request_prefill_kv_computed_tokens", "Prompt tokens computed.", _TOKENS)
        self.ttft_s = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFTS)
        self.inter_token_s = histogram("vllm:inter_token_latency_seconds", "Gaps between tokens.", _GAPS)
        self.e2e_s = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", _DURATIONS)
        self.queue_s = histogram("vllm:request_queue_time_seconds", "Waiting on the prefill worker.", _DURATIONS)
        self.prefill_s = histogram("vllm:request_prefill_time_seconds", "Loading and computing.", _DURATIONS)
        self.decode_s = histogram("vllm:request_decode_time_seconds", "First token to last.", _DURATIONS)
        self.prompt_length = histogram("vllm:request_prompt_tokens", "Prompt lengths.", _TOKENS)
        self.generation_length = histogram("vllm:request_generation_tokens", "Output lengths.", _TOKENS)
        text = "Output lengths, of several choices the longest."
        self.longest_generation = histogram("vllm:request_max_num_generation_tokens", text, _TOKENS)
        self.num_choices = histogram("vllm:request_params_n", "Choices asked for.", _TOKENS)
        self.max_tokens = histogram("vllm:request_params_max_tokens", "Bounds of output lengths.", _TOKENS)
        text = "Prefill and decode, without waiting."
        self.inference_s = histogram("vllm:request_inference_time_seconds", text, _DURATIONS)
        text = "Mean gaps between a request's tokens."
        self.tpot_s = histogram("vllm:request_time_per_output_token_seconds", text, _GAPS)
        text = "Tokens that a worker's step made for this gateway."
        self.step_tokens = histogram("vllm:iteration_tokens_total", text, _TOKENS)
        text = "Requests that ended well."
        self.success = of.counters_by("finished_reason", FinishReason, "vllm:request_success", text)
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of decode KV blocks in use, 0 to 1.")
        text = "Requests that ended in an error, by its code."
        self.failures = of.counters_by("code", error_classes(), "moonserve_request_failures", text)
        self.retries = counter("moonserve_request_retries", "Requests placed again after a loss.")
        name, text, labels = "moonserve_request_phase_seconds", "Where the time of requests went.", of.labels
        by_phase = Histogram(name, text, (*labels, "phase"), registry=registry, buckets=_PHASES)
        self.phases = {phase: by_phase.labels(**labels, phase=phase) for phase in phases}

    def prefilled(self, num_tokens: int, own: int, loaded: int) -> None:
        """Counts the tokens of a prompt: `own` were in its worker's cache, `loaded` were read from stores."""
        computed = num_tokens - own - loaded
        self._own_queries.add(num_tokens)
        self._own_hits.add(own)
        self._store_queries.add(num_tokens - own)
        self._store_hits.add(loaded)
        self._cached.add(own + loaded)
        self._computed.add(computed)
        for source, count in zip(_SOURCES, (computed, own, loaded), strict=True):
            self._by_source[source].inc(count)


class Samples:
    """Durations of the last minute, at most the latest 4,096."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)

    def add(self, seconds: float, now: float) -> None:
        self._samples.append((now, seconds))

    def summary(self, now: float, window_s: float = WINDOW_S) -> dict[str, float | int | None]:
        """Returns percentiles in seconds of the last `window_s`; None if there is no sample."""
        recent = sorted(seconds for at, seconds in self._samples if at > now - window_s)
        shown = {f"p{p}": percentile(recent, p) if recent else None for p in (50, 95, 99)}
        return {**shown, "count": len(recent)}


@dataclass(slots=True, eq=False, kw_only=True)
class _Prefix:
    """A prefix that requests had in common."""

    num_tokens: int
    excerpt: tuple[Sequence[int], ...]  # its first and last tokens
    heat: float = 0.0  # number of uses, each decaying
    seen_at: float = 0.0
    holders: set[str] = field(default_factory=set)  # instances found to have it

    def at(self, now: float) -> float:
        return float(self.heat * 0.5 ** ((now - self.seen_at) / _HALF_LIFE_S))


class RecentFigures:
    """Recent figures of one gateway."""

    def __init__(self) -> None:
        self.ttft = Samples()
        self.gaps = Samples()
        self.totals: Counter[str] = Counter(dict.fromkeys(_TOTALS, 0))
        self.rejections: Counter[str] = Counter()  # by reason
        self.failures: Counter[str] = Counter()  # by code
        self.phase_s: defaultdict[str, float] = defaultdict(float)  # of choices that ended well
        self.flows: Counter[tuple[str, str]] = Counter()  # tokens that went from one process to another
        self.timings: OrderedDict[str, dict[str, Any]] = OrderedDict()  # of the latest 256 choices that ended, by id
        self._prefixes: OrderedDict[BlockKey, _Prefix] = OrderedDict()
        self._latest: deque[dict[str, Any]] = deque(maxlen=_NUM_LATEST)

    def ended(
        self,
        request_id: str,
        outcome: str,
        tokens: Mapping[str, int],
        ttft_s: float | None,
        e2e_s: float,
        timing: Mapping[str, Any],
    ) -> None:
        """Records the end of one choice. `outcome`: finish reason or error code. Times are seconds from arrival;
        `ttft_s` is None if there was no token. `timing`: of its phases and tokens, as JSON."""
        times = {"ttft_s": ttft_s, "e2e_s": e2e_s}
        self._latest.append({"request_id": request_id, "outcome": outcome, **tokens, **times})
        self.timings[request_id] = {**times, **timing}
        if len(self.timings) > _NUM_TIMED:
            self.timings.popitem(last=False)

    def moved(self, source: str, target: str, num_tokens: int) -> None:
        """Records tokens that went from one process to another. Of more than 1,024 pairs, the oldest are dropped."""
        self.flows[source, target] += num_tokens
        if len(self.flows) > _MAX_FLOWS:
            del self.flows[next(iter(self.flows))]

    def placed(self, placement: Placement, num_tokens: int, cached_tokens: int, block_size: int) -> int:
        """Records at the first token where the prompt's tokens came from and went to. The placement names the stores
        to read blocks from; blocks before these were in the worker's own cache. Returns the number read from stores."""
        prefill, loaded = placement.prefill, 0
        for source in placement.prefix_sources:
            first = source.first_block * block_size
            tokens = max(0, min(cached_tokens - first, source.num_blocks * block_size))
            is_near = source.store.host == prefill.host
            self.totals["host_store_tokens" if is_near else "remote_store_tokens"] += tokens
            self.moved(source.store.instance_id, prefill.instance_id, tokens)
            loaded += tokens
        self.totals["prompt_tokens"] += num_tokens
        self.totals["cached_tokens"] += cached_tokens
        self.totals["device_tokens"] += cached_tokens - loaded
        self.moved(GATEWAY, prefill.instance_id, num_tokens)
        if not placement.is_local_prefill:
            self.moved(prefill.instance_id, placement.decode.instance_id, num_tokens)
        return loaded

    def reused(self, leaf: BlockKey, prompt: Sequence[int], cached: int, holders: Iterable[str], now: float) -> None:
        """Records that a prompt's first `cached` tokens were found in caches. `leaf`: key of their last block."""
        found = self._prefixes.get(leaf)
        if found is None:
            middle = max(_EXCERPT_TOKENS, cached - _EXCERPT_TOKENS)
            ends = (prompt[: min(_EXCERPT_TOKENS, cached)], prompt[middle:cached])
            found = self._prefixes[leaf] = _Prefix(num_tokens=cached, excerpt=ends, seen_at=now)
        found.heat, found.seen_at = found.at(now) + 1.0, now
        found.holders.update(holders)
        self._prefixes.move_to_end(leaf)
        if len(self._prefixes) > _MAX_PREFIXES:
            self._prefixes.popitem(last=False)

    def as_json(self, now: float) -> dict[str, Any]:
        """Returns all figures except prefixes and requests, which are reserved for keys that may see all tenants."""
        return {
            "window_s": WINDOW_S,
            "at_s": now,
            "ttft_s": self.ttft.summary(now),
            "tbt_s": self.gaps.summary(now),
            "totals": dict(self.totals),
            "rejections": dict(self.rejections),
            "failures": dict(self.failures),
        }

    def latest_requests(self) -> list[dict[str, Any]]:
        """Returns the latest requests, newest first."""
        return list(reversed(self._latest))

    def levels(self, now: float, window_s: float) -> dict[str, float | None]:
        """Returns the latency percentiles of the last `window_s` for the history, in seconds."""
        summaries = {"ttft": self.ttft.summary(now, window_s), "tbt": self.gaps.summary(now, window_s)}
        return {f"{name}/{p}": s[p] for name, s in summaries.items() for p in ("p50", "p95", "p99")}

    def sums(self) -> dict[str, float]:
        """Returns what only grows, for the history."""
        times = {f"time/{phase}": seconds for phase, seconds in self.phase_s.items()}
        return {**self.totals, **times, "rejected": self.rejections.total(), "failed": self.failures.total()}

    def hot_prefixes(self, now: float, text_of: Callable[[Sequence[int]], str] | None) -> list[dict[str, Any]]:
        """Returns the hottest prefixes, hottest first. `text_of`: decodes tokens; None = without their text."""
        ranked = sorted(self._prefixes.items(), key=lambda entry: -entry[1].at(now))
        return [
            {
                "key": leaf.hex(),
                "tokens": prefix.num_tokens,
                "heat": round(prefix.at(now), 2),
                "holders": sorted(prefix.holders),
                "text": None if text_of is None else " … ".join(map(text_of, filter(None, prefix.excerpt))),
            }
            for leaf, prefix in ranked[:_SHOWN_PREFIXES]
        ]


class DecodeMetrics:
    """Metrics summed over the decode workers of one view. Counts survive the workers' restarts."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self._counted: dict[str, tuple[int, int]] = {}  # instance → (epoch, preemptions)

    def take(self, view: conductor_pb2.ClusterView) -> None:
        """Updates the metrics from a view."""
        workers = [i for i in view.instances if role_from_wire(i.role) is Role.DECODE]
        used = sum(worker.load.held_blocks + worker.load.leased_blocks for worker in workers)
        total = sum(worker.num_blocks for worker in workers)
        self._metrics.kv_usage.set(used / total if total else 0.0)
        for worker in workers:
            self._count(worker)

    def _count(self, worker: conductor_pb2.InstanceView) -> None:
        endpoint, preemptions = worker.endpoint, worker.load.num_preemptions
        epoch, counted = self._counted.get(endpoint.instance_id, (endpoint.epoch, 0))
        if epoch != endpoint.epoch:
            counted = 0  # another process of this name; it counts from zero
        self._metrics.preemptions.add(max(0, preemptions - counted))
        self._counted[endpoint.instance_id] = (endpoint.epoch, preemptions)
