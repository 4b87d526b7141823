"""The project's own policy: a prompt goes where it adds the least delay, its own and that of prompts it goes before.

Mean TTFT is the sum of all delays, so what a placement costs is its own TTFT and, for each prompt that it makes wait,
its prefill time (Smith 1956: on one machine, shortest first is then the best order). Five terms, each from predictions
that the conductor has anyway; lengths of answers and later arrivals are unknown to it:

1. *Order.* A prompt yields for `patience` times its own prefill time: shortest first, but nobody is overtaken by what
   arrives after that, so nobody starves. Where prefill times vary a lot, the exact value hardly matters.
2. *Objective.* It never yields longer than the TTFT objective leaves it, given all that waits there. When queues are
   long that is not at all, and the order is that of arrival: what was promised in time stays in time.
3. *Price.* Seconds are scarce when many wait. A prompt is worth its seconds of prefill up to the objective ×
   (1 − queue / objective)^`steepness`. The rest is late in any case or makes several others late: it goes behind all
   that is worth it (for `late` objectives, then it is its turn), where an idle moment may still serve it in time.
   Its predicted TTFT is beyond the objective, so that admission, where there is one, refuses it.
4. *Place.* The instance with the smallest own TTFT + prefill time × prompts delayed. Prefixes are fetched as in
   Algorithm 1 (FAST'25), but where fetching is predicted to be faster than computing, without a threshold.
5. *Copies.* An instance without the best prefix would store it once more, which in a full pool is another prefix less:
   that counts `copy` times what computing those blocks takes, so that of similar instances a holder wins.

The constants were tuned on synthetic traces (`traces.synthesis`), not on the published one; docs/policies.md has the
table against Algorithm 1 and what each term is worth. Knows numbers only, like every policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from conductor.columns import Floats, Ints
from conductor.native.prefills import prefill_library
from conductor.policies.base import Looks, Offers, Prompt, Weighed, predict

# Instances whose queues are looked at exactly; beyond, an instance is among them by its wait in order of arrival.
_MOST_EXACT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How much each of them counts."""

    # Times its own prefill time; 2 to 50: mean TTFTs within 3 % of each other.
    patience: float = 5.0
    keeps_objective: bool = True
    steepness: float | None = 4.0  # 3 to 6 differ little; None: no price
    late: float = 30.0  # objectives that a prompt too dear waits at most: 15 minutes of 30 s
    late_patience: float = 10.0  # among those, likewise shortest first
    counts_delayed: bool = True
    copy: float = 0.1  # at 0.3 half of all fetches are saved, and the mean TTFT of idle clusters is 1 % higher


class _Exact(NamedTuple):
    """One instance, with its queue in the order of ranks."""

    rank: float
    wait_s: float
    added_s: float


class LeastAddedDelay:
    """Chosen by `--placement-policy moonserve`."""

    name = "moonserve"
    balancing_threshold: float | None = None
    by_session = False

    def __init__(self, terms: Terms | None = None) -> None:
        self._terms = own = terms or Terms()
        price = (own.steepness is not None, own.steepness or 0.0)
        late = (own.late, own.late_patience)
        # In the order of `Terms` of prefills.c.
        self._numbers = np.array(
            [own.patience, own.keeps_objective, *price, *late, own.counts_delayed, own.copy], float
        )

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        library, look = prefill_library(), offers.look
        if library is None or not isinstance(look, Looks):
            return self._weigh_by_columns(prompt, offers)
        reuse_blocks, found = library.faster(
            offers.columns, prompt.num_tokens, prompt.block_size, prompt.best_blocks
        )
        load_s, transfer_s, prefill_s, ttft_s, _ = found
        rows, slo_s = _worth_a_look(ttft_s), prompt.ttft_slo_s
        records = look.records(rows.tolist())
        rank, queue_s, added_s, ttft_s, score = library.weigh(
            found, offers.queue_s, rows, records, self._numbers, now=look.now, slo_s=slo_s
        )
        return Weighed(
            reuse_blocks, load_s, transfer_s, prefill_s, ttft_s, score, rank, queue_s, added_s
        )

    def _weigh_by_columns(self, prompt: Prompt, offers: Offers) -> Weighed:
        """The same in numpy, with whatever looks at the queues."""
        weighed, copied_s = _predict_faster(prompt, offers)
        slo_s = prompt.ttft_slo_s
        rows = _worth_a_look(weighed.ttft_s)
        columns = (rows, weighed.prefill_s[rows], offers.queue_s[rows])
        seconds = zip(*(column.tolist() for column in columns), strict=True)
        looks = [self._look(row, own_s, all_s, prompt, offers) for row, own_s, all_s in seconds]
        exact = np.zeros((3, len(weighed.ttft_s)))
        exact[1] = offers.queue_s
        exact[:, rows] = np.array(looks).T
        rank, queue_s, added_s = exact
        own_s = weighed.ttft_s - offers.queue_s
        cost_s = own_s + queue_s + self._terms.copy * copied_s
        score = np.full(len(cost_s), math.inf)
        score[rows] = (cost_s + added_s if self._terms.counts_delayed else cost_s)[rows]
        # What passes a late prompt is not there yet. Of the wait no more is known than that it is not within bounds.
        queue_s = np.where(rank > slo_s, np.maximum(queue_s, slo_s), queue_s)
        ttft_s = own_s + queue_s
        return weighed._replace(
            ttft_s=ttft_s, score=score, rank=rank, queue_s=queue_s, added_s=added_s
        )

    def _look(
        self, row: int, prefill_s: float, all_s: float, prompt: Prompt, offers: Offers
    ) -> _Exact:
        """`all_s`: until all that is there has run."""
        slo_s = prompt.ttft_slo_s
        if not all_s:
            return _Exact(yields_s(prefill_s, 0.0, slo_s, self._terms), 0.0, 0.0)
        # Prompts that are late have ranks beyond the objective, until their time comes.
        queue_s = all_s if math.isinf(slo_s) else offers.wait_s(row, slo_s)
        rank = yields_s(prefill_s, queue_s, slo_s, self._terms)
        wait_s, num_delayed = offers.look(row, rank)
        return _Exact(rank, wait_s, prefill_s * num_delayed)


def yields_s(prefill_s: float, queue_s: float, slo_s: float, terms: Terms) -> float:
    """For how long a prompt lets others pass where `queue_s` waits before all that is late (terms 1 to 3)."""
    patience_s = terms.patience * prefill_s
    if math.isinf(slo_s):
        return patience_s
    left = max(1.0 - queue_s / slo_s, 0.0) if slo_s > 0 else 0.0
    if terms.steepness is not None and prefill_s > slo_s * left**terms.steepness:
        return terms.late * slo_s + terms.late_patience * prefill_s
    if terms.keeps_objective:
        return min(patience_s, max(slo_s - queue_s - prefill_s, 0.0))
    return patience_s


def _predict_faster(prompt: Prompt, offers: Offers) -> tuple[Weighed, Floats]:
    """Each instance uses its own prefix, or also fetches what it lacks of the best one, where that is faster; and
    what computing takes there of the best prefix, if it is not fetched."""
    own, best = offers.prefix_blocks, np.maximum(offers.prefix_blocks, prompt.best_blocks)
    computed, fetched = predict(prompt, offers, own), predict(prompt, offers, best)
    copied_s: Floats = computed.prefill_s - fetched.prefill_s
    is_faster = fetched.ttft_s < computed.ttft_s
    if not np.count_nonzero(is_faster):
        return computed, copied_s
    return predict(prompt, offers, np.where(is_faster, best, own)), copied_s


def _worth_a_look(ttft_s: Floats) -> Ints:
    """Rows of the instances that would be best in order of arrival."""
    if len(ttft_s) <= _MOST_EXACT:
        return np.arange(len(ttft_s))
    return np.argpartition(ttft_s, _MOST_EXACT)[:_MOST_EXACT]
