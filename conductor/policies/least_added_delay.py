"""The project's own policy: a prompt goes where it adds the least delay, its own and that of prompts it goes before.

Mean TTFT is the sum of all delays, so what a placement costs is its own TTFT and, for each prompt that it makes wait,
its prefill time (Smith 1956: on one machine, shortest first is then the best order). Four terms, each from predictions
that the conductor has anyway; lengths of answers and later arrivals are unknown to it:

1. *Order.* A prompt yields for `_PATIENCE` times its own prefill time: shortest first, but nobody is overtaken by what
   arrives after that, so nobody starves. Where prefill time varies a lot, its exact value hardly matters.
2. *Objective.* It never yields longer than the TTFT objective leaves it, given all that waits there. When queues are
   long that is not at all, and the order is that of arrival: what was promised in time stays in time.
3. *Price.* Seconds are scarce when many wait. A prompt is worth its seconds of prefill up to the objective ×
   (1 − queue / objective)^`_STEEPNESS`. The rest is late in any case or makes several others late: it goes behind all
   that is worth it (for `_LATE` objectives, then it is its turn), where an idle moment may still serve it in time.
   Admission, where there is one, compares with the wait behind all others, which is what is predicted for it.
4. *Place.* The instance with the smallest own TTFT + prefill time × prompts delayed. Prefixes are fetched as in
   Algorithm 1 (FAST'25), but where fetching is predicted to be faster than computing, without a threshold.

The constants were tuned on synthetic traces (`traces.synthesis`), not on the published one; docs/policies.md has the
table against Algorithm 1 and what each term is worth. Knows numbers only, like every policy.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from conductor.columns import Floats
from conductor.policies.base import Offers, Prompt, Weighed, predict

# Times its own prefill time that a prompt lets others pass: 2 to 50 give mean TTFTs within 2 % of each other.
_PATIENCE = 5.0
# 1 would admit whatever can still be in time; from 3 to 6 the mean TTFT under overload changes by a few percent.
_STEEPNESS = 4
# An overload that lasts longer than this many objectives (15 minutes at 30 s) has those of its begin served now.
_LATE = 30.0
# Likewise among those, shortest first.
_LATE_PATIENCE = 10.0
# Instances whose queues are looked at exactly; beyond, an instance is among them by its wait in order of arrival.
_MOST_EXACT = 16


class _Exact(NamedTuple):
    """One instance, with its queue in the order of ranks."""

    rank: float
    wait_s: float
    score: float


class LeastAddedDelay:
    """Chosen by `--placement-policy moonserve`."""

    name = "moonserve"
    balancing_threshold: float | None = None
    by_session = False

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        weighed = _predict_faster(prompt, offers)
        num_rows = len(weighed.ttft_s)
        rank, queue_s = np.zeros(num_rows), offers.queue_s.copy()
        score = np.full(num_rows, math.inf)
        for row in _worth_a_look(weighed.ttft_s):
            exact = _look(row, prompt, offers, weighed)
            rank[row], queue_s[row], score[row] = exact
        ttft_s = weighed.ttft_s - offers.queue_s + queue_s
        return weighed._replace(ttft_s=ttft_s, score=score, rank=rank, queue_s=queue_s)


def yields_s(prefill_s: float, queue_s: float, slo_s: float) -> float:
    """For how long a prompt lets others pass where `queue_s` waits before all that is late (terms 1 to 3)."""
    if math.isinf(slo_s):
        return _PATIENCE * prefill_s
    left = max(1.0 - queue_s / slo_s, 0.0) if slo_s > 0 else 0.0
    if prefill_s > slo_s * left**_STEEPNESS:
        return _LATE * slo_s + _LATE_PATIENCE * prefill_s
    return min(_PATIENCE * prefill_s, max(slo_s - queue_s - prefill_s, 0.0))


def _predict_faster(prompt: Prompt, offers: Offers) -> Weighed:
    """Each instance uses its own prefix, or also fetches what it lacks of the best one, where that is faster."""
    own, best = offers.prefix_blocks, np.maximum(offers.prefix_blocks, prompt.best_blocks)
    computed = predict(prompt, offers, own)
    is_faster = predict(prompt, offers, best).ttft_s < computed.ttft_s
    if not np.count_nonzero(is_faster):
        return computed
    return predict(prompt, offers, np.where(is_faster, best, own))


def _worth_a_look(ttft_s: Floats) -> list[int]:
    """Rows of the instances that would be best in order of arrival."""
    if len(ttft_s) <= _MOST_EXACT:
        return list(range(len(ttft_s)))
    rows: list[int] = np.argpartition(ttft_s, _MOST_EXACT)[:_MOST_EXACT].tolist()
    return rows


def _look(row: int, prompt: Prompt, offers: Offers, weighed: Weighed) -> _Exact:
    prefill_s, slo_s = float(weighed.prefill_s[row]), prompt.ttft_slo_s
    # Prompts that are late have ranks beyond the objective, until their time comes.
    queue_s = float(offers.queue_s[row]) if math.isinf(slo_s) else offers.wait_s(row, slo_s)
    rank = yields_s(prefill_s, queue_s, slo_s)
    wait_s = offers.wait_s(row, rank)
    added_s = prefill_s * offers.num_delayed(row, rank)
    own_s = float(weighed.load_s[row] + weighed.transfer_s[row]) + wait_s + prefill_s
    return _Exact(rank, wait_s, own_s + added_s)
