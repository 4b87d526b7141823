"""Bounds that no placement policy can beat in the simulator: most requests in time, lowest mean TTFT.

A request is in time only if its prompt is computed by its *deadline*, arrival + TTFT objective. Work is prefill time on
one machine. All bounds know the trace in advance and use only these facts, which hold for every policy:

1. A prompt's full blocks are computed in order, each after all before it, by this request or another one. Blocks that
   an earlier request had may exist already. The others, *new* blocks, exist in no machine before the arrival, because
   only later requests have them too. A request computes what follows its full blocks itself.
2. So new blocks and remainder are computed between arrival and first token, one after the other. They are no other
   request's new blocks or remainder, so that work of several requests adds up.
3. P machines do at most P seconds of work per second.

Left out, which can only make a bound weaker: decoding (the TBT objective, memory), transfers, eviction, chunks, that
the last token is always computed, and the constant c0 of a prefill step, which prompts may share. A slowdown or a fault
also only costs time. Prefill by decode machines, role changes and groups are different machines: ValueError.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonserve.traces.format import TraceRecord
from moonserve.traces.simulator.spec import ClusterSpec
from moonserve.traces.workload.prefix_tree import prefix_tree

Floats = npt.NDArray[np.float64]

_ROUNDING_S = 1e-6  # simulated times are sums of floats; a bound may not fall below them
_NUM_PRICES = 30  # tried per search: narrows the interval by 0.618 each, to a millionth


@dataclass(frozen=True, kw_only=True)
class PrefillWork:
    """Least work of the requests of a trace, in order of arrival, and of the blocks that they share."""

    arrived_s: Floats
    new_s: Floats  # of each request: its new blocks and its remainder
    remainder_s: Floats  # of each request: tokens after its full blocks
    last_blocks: list[int]  # of each request: its last full block; -1 = none
    parents: list[int]  # of each block: the block before it, which has a lower number; -1 = none
    block_s: list[float]  # of each block

    @classmethod
    def of(cls, records: Sequence[TraceRecord], spec: ClusterSpec) -> PrefillWork:
        """Raises ValueError if a block has different predecessors, since the simulator would share it nevertheless."""
        records = sorted(records, key=lambda record: record.arrived_s)
        tree, profile = prefix_tree(records), spec.model.prefill
        if tree.num_blocks != len({hash_id for record in records for hash_id in record.hash_ids}):
            raise ValueError("a hash id of the trace stands for blocks after different prefixes")

        def work_s(end: int, begin: int) -> float:
            return profile.seconds(end, begin) - profile.c0

        parents, block_s = [-1] * tree.num_blocks, [0.0] * tree.num_blocks
        new_s, remainder_s, last_blocks = [], [], []
        for record, visit in zip(records, tree.visits, strict=True):
            size = record.tokens_per_hash
            full = visit.blocks[: record.input_length // size]
            for depth, block in enumerate(full):
                parents[block] = full[depth - 1] if depth else -1
                block_s[block] = work_s((depth + 1) * size, depth * size)
            new_s.append(work_s(record.input_length, min(visit.num_seen, len(full)) * size))
            remainder_s.append(work_s(record.input_length, len(full) * size))
            last_blocks.append(full[-1] if full else -1)
        return cls(
            arrived_s=np.array([record.arrived_s for record in records]),
            new_s=np.array(new_s),
            remainder_s=np.array(remainder_s),
            last_blocks=last_blocks,
            parents=parents,
            block_s=block_s,
        )


def most_in_time(records: Sequence[TraceRecord], spec: ClusterSpec) -> int:
    """Returns an upper bound on the number of requests within the objectives: the lower one of two."""
    _require_fixed_prefill_machines(spec)
    work = PrefillWork.of(records, spec)
    return min(
        most_by_deadlines(work.arrived_s, work.new_s, spec.num_prefill, spec.ttft_slo_s),
        most_by_shared_work(work, spec.num_prefill, spec.ttft_slo_s),
    )


def most_by_deadlines(arrived_s: Floats, work_s: Floats, num_machines: int, ttft_slo_s: float) -> int:
    """Returns the largest number of requests whose `work_s` fits between arrival and deadline, on one machine of
    `num_machines` times the speed. Prefixes that earlier requests had are free, even if these were rejected.

    It bounds the number in time by facts 2 and 3. By fact 2 also, a request with more work than the objective is late.
    Deadlines are in order of arrival, so computing in this order is best. Adding requests in this order and dropping,
    when one is late, the one without which the others end first is optimal (Kise, Ibaraki, Mine, Operations Research 26
    (1978); correct proof: Li, Li, Yan, Optimization Letters 7 (2013))."""
    begins, works = np.empty(arrived_s.size), np.empty(arrived_s.size)
    count, ends_at = 0, -math.inf
    for arrived_at, seconds in zip(arrived_s.tolist(), work_s.tolist(), strict=True):
        if seconds > ttft_slo_s + _ROUNDING_S:
            continue
        begins[count], works[count] = arrived_at, seconds / num_machines
        count += 1
        ends_at = max(ends_at, arrived_at) + works[count - 1]
        if ends_at > arrived_at + ttft_slo_s + _ROUNDING_S:
            dropped, ends_at = _drop(begins[:count], works[:count])
            begins[dropped : count - 1] = begins[dropped + 1 : count].copy()
            works[dropped : count - 1] = works[dropped + 1 : count].copy()
            count -= 1
    return count


def _drop(arrived_s: Floats, work_s: Floats) -> tuple[int, float]:
    """Returns the request without which the others, in order of arrival, end first, and their end.

    They end at the maximum over i of arrival i + work from i on. Without k, terms up to k lack its work. Term k itself
    may stay: it is not above term k + 1, and for the last request not above the next arrival."""
    ends = arrived_s + np.cumsum(work_s[::-1])[::-1]
    before = np.maximum.accumulate(ends) - work_s
    after = np.append(np.maximum.accumulate(ends[::-1])[::-1][1:], -math.inf)
    without = np.maximum(before, after)
    dropped = int(np.argmin(without))
    return dropped, float(without[dropped])


def most_by_shared_work(work: PrefillWork, num_machines: int, ttft_slo_s: float) -> int:
    """Returns a bound that charges a prefix once if any request in time has it, so that a rejected request leaves none.

    Between the first arrival and the last deadline, `num_machines` machines compute each block of each request in time
    at least once, and its remainder. For every price per second of work, the number in time is at most the price of all
    machine seconds plus the largest sum, over a set of requests, of 1 − price · (own remainder) less the price of their
    blocks (weak duality). The sum is largest for a set that is found from the last blocks of the tree to its first
    ones: a block is worth its price only if what follows it is. The bound is convex in the price. It equals that of the
    linear program. Further constraints for shorter windows lower it by less than 0.1 % on the published trace."""
    machine_s = num_machines * float(work.arrived_s[-1] - work.arrived_s[0] + ttft_slo_s)
    possible = work.new_s <= ttft_slo_s + _ROUNDING_S

    def bound(price: float) -> float:
        values = [0.0] * (len(work.parents) + 1)  # of a block and what follows it; the last element is the root, -1
        gains = np.where(possible, np.maximum(1.0 - price * work.remainder_s, 0.0), 0.0)
        for block, gain in zip(work.last_blocks, gains.tolist(), strict=True):
            values[block] += gain
        for block in range(len(work.parents) - 1, -1, -1):
            value = values[block] - price * work.block_s[block]
            if value > 0.0:
                values[work.parents[block]] += value
        return values[-1] + price * machine_s

    # Above n / machine seconds a price alone exceeds the bound without one.
    lowest = _minimum(bound, 0.0, work.new_s.size / machine_s)
    return math.floor(lowest + _ROUNDING_S)


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Returns the lowest value found of a convex function: golden-section search."""
    shrink = (math.sqrt(5.0) - 1.0) / 2.0
    left, right = high - shrink * (high - low), low + shrink * (high - low)
    at_left, at_right = function(left), function(right)
    found = min(function(low), function(high), at_left, at_right)
    for _ in range(_NUM_PRICES):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - shrink * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + shrink * (high - low)
            at_right = function(right)
        found = min(found, at_left, at_right)
    return found


def lowest_mean_ttft_s(records: Sequence[TraceRecord], spec: ClusterSpec) -> float:
    """Returns a lower bound on the mean TTFT if every request gets a first token: the highest one of three.

    By fact 2, each TTFT is at least the request's own work. By facts 2 and 3, the mean is at least that of one machine
    of P times the speed, where the least remaining work first is best (Schrage 1968). By fact 2, a request ends at
    least half of its work after the mean time of its work. The sum of these mean times is lowest on the fast machine if
    the least work goes first (Goemans 1997)."""
    _require_fixed_prefill_machines(spec)
    work = PrefillWork.of(records, spec)
    ends_s, _ = _fluid(work.arrived_s, work.new_s, spec.num_prefill, by_remaining=True)
    _, middles_s = _fluid(work.arrived_s, work.new_s, spec.num_prefill, by_remaining=False)
    return max(
        float(np.mean(work.new_s)),
        float(np.mean(ends_s - work.arrived_s)),
        float(np.mean(middles_s + work.new_s / 2 - work.arrived_s)),
    )


def _fluid(arrived_s: Floats, work_s: Floats, speed: int, *, by_remaining: bool) -> tuple[Floats, Floats]:
    """Returns the end and the mean time of each request's work on one machine that interrupts for less work, remaining
    or in all. Without work, both are the arrival."""
    ends_s, middles_s = arrived_s.copy(), arrived_s.copy()
    waiting: list[tuple[float, int, float]] = []  # (order, request, remaining work)
    now = -math.inf
    next_arrivals = [*arrived_s.tolist()[1:], math.inf]
    for request, (arrived_at, next_at) in enumerate(zip(arrived_s.tolist(), next_arrivals, strict=True)):
        now = max(now, arrived_at)
        if work_s[request] > 0.0:
            middles_s[request] = 0.0
            heapq.heappush(waiting, (work_s[request], request, work_s[request]))
        while waiting and now < next_at:
            order, running, left_s = heapq.heappop(waiting)
            done_s = min(left_s, (next_at - now) * speed)
            middles_s[running] += (now + done_s / speed / 2) * done_s / work_s[running]
            if done_s < left_s:
                now, left_s = next_at, left_s - done_s
                heapq.heappush(waiting, (left_s if by_remaining else order, running, left_s))
            else:
                now += done_s / speed
                ends_s[running] = now
    return ends_s, middles_s


def _require_fixed_prefill_machines(spec: ClusterSpec) -> None:
    if spec.conditional or spec.roles is not None or spec.prefill_group != 1:
        raise ValueError("the bounds are for fixed prefill machines that compute alone")
