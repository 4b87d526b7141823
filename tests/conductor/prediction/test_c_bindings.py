"""Tests of the C kernels against Python's queues and the policy's written terms. `test_transfer_time` and
`test_decode_forecast` compare flows and sequences with plain loops."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonserve.conductor.placement.policies.base import Prompt, QueueWaits, predict
from moonserve.conductor.placement.policies.least_added_delay import LeastAddedDelay, Weights
from moonserve.conductor.prediction.c_bindings import FLOW_COLUMNS, FlowKernel, Links
from moonserve.conductor.prediction.instance_table import Floats, PrefillTable, RowRef
from moonserve.conductor.prediction.queue_time import PrefillQueue
from moonserve.protocol.request import RequestId
from tests.conductor.placement.test_policies import offers
from tests.thoroughness import examples

TERMS = st.builds(
    Weights,
    patience=st.sampled_from([0.0, 5.0]),
    keeps_objective=st.booleans(),
    steepness=st.sampled_from([None, 1.0, 4.0]),
    counts_delayed=st.booleans(),
    by_arrival=st.booleans(),
)
SECONDS = st.sampled_from([0.0, 0.5, 1.0, 1.5, 3.0, 10.0])
# One instance: seconds and rank of each placed prompt, and seconds of a step.
QUEUES = st.tuples(st.lists(st.tuples(SECONDS, SECONDS), max_size=5), st.sampled_from([0.5, math.inf]))
UNBOUNDED: Sequence[float] = (math.inf,) * 4


def yields_s(
    prefill_s: float, queue_s: float, slo_s: float, terms: Weights, bounds: Sequence[float] = UNBOUNDED
) -> float:
    """Returns the rank of a prompt by terms 1 to 4 of the policy."""
    mean_s, ttft_s, long_s, late_s = bounds
    patience_s = terms.patience * prefill_s
    if math.isinf(slo_s):
        return patience_s
    left = max(1.0 - queue_s / slo_s, 0.0) if slo_s > 0 else 0.0
    if terms.steepness is not None and prefill_s > slo_s * left**terms.steepness:
        rank = terms.late * slo_s + terms.late_patience * prefill_s
        return 2.0 * rank if prefill_s > long_s else min(rank, max(late_s - prefill_s, 0.0))
    until_s = max(ttft_s - queue_s - prefill_s, 0.0) if prefill_s <= 2.0 * mean_s else math.inf
    patience_s = min(patience_s, 0.5 * mean_s, until_s)
    rest_s = max(slo_s - queue_s - prefill_s, 0.0)
    return min(patience_s, rest_s) if terms.keeps_objective else patience_s


def bounds_of(order: Floats, shortest: tuple[float, float], queue_s: float, now: float) -> Sequence[float]:
    """Returns the bounds by the order of arrival, and learns from the shortest TTFT and prefill time."""
    ttft_s, long_s, mean_queue_s, as_of = order.tolist()
    mean_queue_s += (queue_s - mean_queue_s) * (1.0 - math.exp((as_of - now) / 60.0))
    growth = min(max(queue_s - mean_queue_s, 0.0) / 60.0, 0.95)
    order[:2] *= np.exp(0.1 * (np.array([0.99, 0.993]) - (np.array(shortest) <= order[:2])))
    order[2:] = mean_queue_s, now
    return queue_s, ttft_s, long_s, queue_s / (1.0 - growth) ** 2


# A prompt that would yield to waiting prompts, but may not.
@example([([], 0.5), ([(10.0, 0.0), (3.0, 4.5)], math.inf)], [0] * 4, 1.0, 0.0, math.inf, Weights(), None)
@settings(max_examples=examples(400))
@given(
    queues=st.lists(QUEUES, min_size=1, max_size=4),
    blocks=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    limit=st.none() | SECONDS,
    shift_s=st.sampled_from([0.0, 0.0, -5.0, 1e6]),
    slo_s=st.sampled_from([0.0, 2.0, 30.0, math.inf]),
    terms=TERMS,
    times=st.none() | st.lists(SECONDS, min_size=3, max_size=3),
)
def test_kernel_scores_equal_the_written_terms(
    queues: list[Any],
    blocks: list[int],
    limit: float | None,
    shift_s: float,
    slo_s: float,
    terms: Weights,
    times: list[float] | None,
) -> None:
    """The columns equal the terms with waits from `PrefillQueue.wait_for`, also with a rank limit or shifted places.
    `times`: those in order of arrival, for a prompt that is served if late; None = it is rejected."""
    now, count, ones = 3.0, len(queues), np.ones(len(queues))
    books = []
    for jobs, step_s in queues:
        book = PrefillQueue(RowRef.in_private_table(PrefillTable), step_s)
        for number, (seconds, rank) in enumerate(jobs):
            book.add(RequestId(f"r{number}"), seconds, 1, number * 0.5, rank)
        books.append(SimpleNamespace(queue=book))
    limits = None if limit is None else ones * limit
    own = np.array(blocks[:count])
    made = offers(
        blocks[:count],
        queue_s=np.array([each.queue.estimate_s(now) for each in books]),
        local_s_per_block=ones * 0.01,
        remote_s_per_block=np.linspace(0.1, 2.0, count),
        c0=ones * 0.01,
        c2=ones * 1e-5,
        now=now,
        queue_waits=QueueWaits(books, now, limits, shift_s),  # type: ignore[arg-type]
    )
    prompt = Prompt(num_tokens=100, block_size=10, best_blocks=9, ttft_slo_s=slo_s, rejected_if_late=times is None)
    policy, best = LeastAddedDelay(terms), np.full(count, 9)
    computed, fetched = (predict(prompt, made, reuse) for reuse in (own, best))
    bounds, order = UNBOUNDED, policy.arrival_order
    if times is not None and order is not None:
        order[:3] = times
        is_faster = fetched.ttft_s < computed.ttft_s
        prefill_s = np.where(is_faster, fetched.prefill_s, computed.prefill_s).min()
        shortest = np.minimum(fetched.ttft_s, computed.ttft_s).min(), prefill_s
        learned = order.copy()
        bounds = bounds_of(learned, shortest, made.queue_s.mean(), now)
    own_terms = terms if times is None else replace(terms, steepness=terms.served_steepness)
    weighed = policy.weigh(prompt, made)
    if times is not None and order is not None:
        assert order == pytest.approx(learned)
    assert weighed.ttft_s.shape == (count,)
    for row, (is_faster, queue_s) in enumerate(
        zip(fetched.ttft_s < computed.ttft_s, made.queue_s.tolist(), strict=True)
    ):
        terms_of = fetched if is_faster else computed
        prefill_s = float(terms_of.prefill_s[row])
        wait_s, num_delayed, rank = 0.0, 0, yields_s(prefill_s, 0.0, slo_s, own_terms, bounds)
        if queue_s:
            before_late_s = queue_s if math.isinf(slo_s) else made.queue_waits(row, slo_s)[0]
            rank = yields_s(prefill_s, before_late_s, slo_s, own_terms, bounds)
            wait_s, num_delayed = made.queue_waits(row, rank)
        copied_s = terms.copy * float(computed.prefill_s[row] - fetched.prefill_s[row])
        added_s = prefill_s * num_delayed
        own_s = float(terms_of.ttft_s[row]) - queue_s
        late_s = max(wait_s, slo_s) if rank > slo_s else wait_s
        assert (int(weighed.reuse_blocks[row]), weighed.rank[row]) == (
            (9 if is_faster else own[row]),
            pytest.approx(rank),
        )
        found = weighed.added_s[row], weighed.queue_s[row], weighed.ttft_s[row], weighed.score[row]
        score = own_s + wait_s + copied_s + (added_s if terms.counts_delayed else 0.0)
        assert found == pytest.approx((added_s, late_s, own_s + late_s, score), abs=1e-9)


def test_flow_kernel_accepts_any_number_of_rows_and_rejects_other_layouts() -> None:
    flows = FlowKernel()
    for size in (2, 3_000, 5):
        hosts, rates = np.arange(size, dtype=np.int64), np.full(2 * size, 100.0)
        links = Links(hosts, rates, rates.copy())
        rows = np.array([(0, 2 * i, 50.0, 100.0) for i in range(1, size)])
        flows.advance(rows, links, 1e9)
        found = flows.seconds(rows, links, 0, hosts[1:], np.full(size - 1, 200.0), None)
        assert found.tolist() == [2.0] * (size - 1)
    with pytest.raises((TypeError, ValueError)):
        flows.advance(np.zeros((FLOW_COLUMNS, 4)).T, links, 1.0)
