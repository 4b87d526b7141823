"""Recent figures for people: latencies, rejections and hot prefixes of the last minute. Pure.

`now` is in monotonic seconds. Owns short, bounded histories of what this gateway observed. Counts since the start are
in the metrics.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol.ids import Role
from protocol.keys import BlockKey
from protocol.metrics import RequestMetrics
from protocol.pb import conductor_pb2
from protocol.timeline import percentile
from protocol.wire import role_from_wire

WINDOW_S = 60.0
_MAX_SAMPLES = 4096
_MAX_PREFIXES = 512
_NUM_LATEST = 12
_SHOWN_PREFIXES = 8
_HALF_LIFE_S = 60.0  # of a prefix's heat


class Samples:
    """Durations of the last minute, at most the latest 4,096."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)

    def add(self, seconds: float, now: float) -> None:
        self._samples.append((now, seconds))

    def summary(self, now: float) -> dict[str, float | int | None]:
        """Returns percentiles in seconds; None if there is no sample."""
        recent = sorted(seconds for at, seconds in self._samples if at > now - WINDOW_S)
        shown = {f"p{p}": percentile(recent, p) if recent else None for p in (50, 95, 99)}
        return {**shown, "count": len(recent)}


@dataclass(slots=True, eq=False, kw_only=True)
class _Prefix:
    """A prefix that requests had in common."""

    num_tokens: int
    heat: float = 0.0  # number of uses, each decaying
    seen_at: float = 0.0
    holders: set[str] = field(default_factory=set)  # instances found to have it

    def at(self, now: float) -> float:
        return float(self.heat * 0.5 ** ((now - self.seen_at) / _HALF_LIFE_S))


class Figures:
    """Recent figures of one gateway."""

    def __init__(self) -> None:
        self.ttft = Samples()
        self.gaps = Samples()
        self.totals: Counter[str] = Counter(requests=0, finished=0, output_tokens=0, prompt_tokens=0, cached_tokens=0)
        self.rejections: Counter[str] = Counter()  # by reason
        self.failures: Counter[str] = Counter()  # by code
        self._prefixes: OrderedDict[BlockKey, _Prefix] = OrderedDict()
        self._latest: deque[dict[str, Any]] = deque(maxlen=_NUM_LATEST)

    def ended(
        self,
        request_id: str,
        outcome: str,
        tokens: Mapping[str, int],
        ttft_s: float | None,
        e2e_s: float,
    ) -> None:
        """Records the end of one choice. `outcome`: finish reason or error code. Times are seconds from arrival;
        `ttft_s` is None if there was no token."""
        times = {"ttft_s": ttft_s, "e2e_s": e2e_s}
        self._latest.append({"request_id": request_id, "outcome": outcome, **tokens, **times})

    def reused(self, leaf: BlockKey, num_tokens: int, holders: Iterable[str], now: float) -> None:
        """Records that a prompt's first `num_tokens` tokens were found in caches. `leaf`: key of their last block."""
        found = self._prefixes.setdefault(leaf, _Prefix(num_tokens=num_tokens, seen_at=now))
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

    def hot_prefixes(self, now: float) -> list[dict[str, Any]]:
        """Returns the hottest prefixes, hottest first."""
        ranked = sorted(self._prefixes.items(), key=lambda entry: -entry[1].at(now))
        return [
            {
                "key": leaf.hex(),
                "tokens": prefix.num_tokens,
                "heat": round(prefix.at(now), 2),
                "holders": sorted(prefix.holders),
            }
            for leaf, prefix in ranked[:_SHOWN_PREFIXES]
        ]


class DecodeFigures:
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
        self._metrics.preemptions.inc(max(0, preemptions - counted))
        self._counted[endpoint.instance_id] = (endpoint.epoch, preemptions)
