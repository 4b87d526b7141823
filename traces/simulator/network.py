"""Data in flight between and within machines: flows over links that they share fairly. Pure.

A flow crosses some links (a machine's out and in link, its path from memory to device, its disk) at one rate, the
max-min fair one. When a flow starts or ends, only flows that share links with it, directly or through others, get new
rates. **KV that is still being computed cannot have been sent**: a flow with `not_before` demands at most the rate at
which its last byte arrives at that time, and ends later if its links are slower. Does not know machines, requests or
latency (microseconds are negligible for megabytes).
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Demand(NamedTuple):
    """The bandwidth demand of one flow."""

    links: tuple[int, ...]
    limit: float = math.inf  # maximum useful rate


def fair_rates(demands: Sequence[Demand], capacity: Mapping[int, float]) -> list[float]:
    """Returns the max-min fair rate of each demand, in the units of `capacity`, which must have all links used.

    Progressive filling: the rates of all flows rise evenly. A flow stops when one of its links is full or its limit is
    reached; the others rise further. So no flow can get more without taking from a flow that has no more than it
    (Bertsekas and Gallager, Data Networks, §6.5.2).
    """
    if len(demands) == 1:  # most flows share no link
        links, limit = demands[0]
        return [min(limit, min((capacity[link] for link in links), default=math.inf))]
    rates = [0.0] * len(demands)
    left: dict[int, float] = {}
    num_on: dict[int, int] = {}
    for demand in demands:
        for link in demand.links:
            left[link] = capacity[link]
            num_on[link] = num_on.get(link, 0) + 1
    rising = list(range(len(demands)))
    while rising:
        level, bottleneck = _first_full(left, num_on)
        limited = [i for i in rising if demands[i].limit <= level]
        full = limited or [i for i in rising if bottleneck is None or bottleneck in demands[i].links]
        for i in full:
            rates[i] = min(demands[i].limit, level)
            for link in demands[i].links:
                left[link] = max(left[link] - rates[i], 0.0)
                num_on[link] -= 1
        stopped = set(full)
        rising = [i for i in rising if i not in stopped]
    return rates


def _first_full(left: Mapping[int, float], num_on: Mapping[int, int]) -> tuple[float, int | None]:
    """Returns the even rate at which the first link is full, and that link; infinity and None if no link is used."""
    level, bottleneck = math.inf, None
    for link, count in num_on.items():
        if count and left[link] / count < level:
            level, bottleneck = left[link] / count, link
    return level, bottleneck


FlowId = int


@dataclass(slots=True, eq=False)
class _Flow:
    """A transfer in flight."""

    flow_id: FlowId
    links: tuple[int, ...]
    left: float  # bytes, at `as_of`
    as_of: float
    not_before: float
    rate: float = 0.0  # bytes per second, since `as_of`
    ends_at: float = math.inf
    version: int = 0  # number of changes of `ends_at`

    def demand(self, now: float) -> Demand:
        time_s = self.not_before - now
        return Demand(self.links, self.left / time_s if time_s > 0 else math.inf)

    def account_bytes(self, now: float) -> float:
        """Deducts the bytes transferred since `as_of` and returns their number."""
        if now <= self.as_of:
            return 0.0
        carried = min(self.rate * (now - self.as_of), self.left)
        self.left -= carried
        self.as_of = now
        return carried


class Network:
    """Flows by number, in the order of their start."""

    def __init__(self, capacities: Mapping[str, float]) -> None:
        """`capacities`: bytes per second of each link, above 0."""
        self._number = {name: number for number, name in enumerate(capacities)}
        self._capacity = dict(enumerate(capacities.values()))
        self._flows: dict[FlowId, _Flow] = {}
        self._on: dict[int, dict[FlowId, _Flow]] = {link: {} for link in self._capacity}
        self._ends: list[tuple[float, FlowId, int]] = []
        self._num_started = 0
        self.bytes_started = 0.0
        self.bytes_transferred = 0.0  # settled flows only
        self.bytes_cancelled = 0.0  # remaining bytes of cancelled flows

    def __len__(self) -> int:
        return len(self._flows)

    @property
    def wake_at(self) -> float | None:
        """Time at which the next flow ends; None = no flow is in flight."""
        while self._ends:
            ends_at, flow_id, version = self._ends[0]
            flow = self._flows.get(flow_id)
            if flow is not None and flow.version == version:
                return ends_at
            heapq.heappop(self._ends)
        return None

    def start(self, links: Sequence[str], num_bytes: float, now: float, not_before: float = 0.0) -> FlowId:
        """Starts a flow of `num_bytes` that ends no sooner than `not_before`. It may end immediately: see `advance`."""
        self._num_started += 1
        flow = _Flow(
            self._num_started,
            tuple(self._number[link] for link in links),
            float(num_bytes),
            now,
            not_before,
        )
        self._flows[flow.flow_id] = flow
        self.bytes_started += num_bytes
        for link in flow.links:
            self._on[link][flow.flow_id] = flow
        self._update_rates(self._component(flow), now)
        return flow.flow_id

    def cancel(self, flow_id: FlowId, now: float) -> None:
        """Cancels the rest of a flow. An unknown flow has already ended."""
        flow = self._flows.get(flow_id)
        if flow is None:
            return
        self.bytes_transferred += flow.account_bytes(now)
        self.bytes_cancelled += flow.left
        self._remove(flow)
        self._update_rates(self._component(flow), now)

    def advance(self, now: float) -> list[FlowId]:
        """Returns the flows that end by `now`, in order of their ends. Call it at `wake_at`."""
        ended: list[FlowId] = []
        while (at := self.wake_at) is not None and at <= now:
            flow = self._flows[heapq.heappop(self._ends)[1]]
            ended.append(flow.flow_id)
            self.bytes_transferred += flow.left
            self._remove(flow)
            self._update_rates(self._component(flow), at)
        return ended

    def _remove(self, flow: _Flow) -> None:
        del self._flows[flow.flow_id]
        for link in flow.links:
            del self._on[link][flow.flow_id]

    def _component(self, changed: _Flow) -> list[_Flow]:
        """Returns the flow, if it goes on, and all flows connected to it by shared links, in order of their numbers."""
        found = {changed.flow_id: changed} if changed.flow_id in self._flows else {}
        seen: set[int] = set()
        links = list(changed.links)
        while links:
            link = links.pop()
            if link in seen:
                continue
            seen.add(link)
            for flow_id, flow in self._on[link].items():
                if flow_id not in found:
                    found[flow_id] = flow
                    links += flow.links
        return [found[flow_id] for flow_id in sorted(found)]

    def _update_rates(self, flows: Sequence[_Flow], now: float) -> None:
        for flow in flows:
            self.bytes_transferred += flow.account_bytes(now)
        rates = fair_rates([flow.demand(now) for flow in flows], self._capacity)
        for flow, rate in zip(flows, rates, strict=True):
            flow.rate = rate
            ends_at = self._end_of(flow, now)
            if ends_at != flow.ends_at:
                flow.ends_at = ends_at
                flow.version += 1
                heapq.heappush(self._ends, (ends_at, flow.flow_id, flow.version))

    @staticmethod
    def _end_of(flow: _Flow, now: float) -> float:
        if flow.left <= 0.0 or math.isinf(flow.rate):
            return max(now, flow.not_before)
        return max(now + flow.left / flow.rate, flow.not_before)

    def validate(self) -> None:
        """Raises AssertionError unless bytes are conserved and no link exceeds its capacity."""
        left = sum(flow.left for flow in self._flows.values())
        told = self.bytes_transferred + self.bytes_cancelled + left
        assert math.isclose(told, self.bytes_started, rel_tol=1e-9, abs_tol=1e-3), "bytes are lost"
        for link, flows in self._on.items():
            assert all(self._flows[flow_id] is flow for flow_id, flow in flows.items())
            rate = sum(flow.rate for flow in flows.values())
            assert rate <= self._capacity[link] * (1 + 1e-9), "a link carries too much"
        for flow in self._flows.values():
            assert all(flow.flow_id in self._on[link] for link in flow.links)
            assert flow.rate > 0.0, "a flow starves"
            assert flow.ends_at >= flow.not_before
