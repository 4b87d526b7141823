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

from dataclasses import dataclass

import numpy as np

from conductor.columns import Floats, Ints
from conductor.native.kernels import prefill_kernel
from conductor.policies.base import Offers, Prompt, Weighed

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


class LeastAddedDelay:
    """Chosen by `--placement-policy moonserve`."""

    name = "moonserve"
    balancing_threshold: float | None = None
    by_session = False

    def __init__(self, terms: Terms | None = None) -> None:
        own = terms or Terms()
        price = (own.steepness is not None, own.steepness or 0.0)
        late = (own.late, own.late_patience)
        # In the order of `Terms` of prefills.c.
        self._numbers = np.array(
            [own.patience, own.keeps_objective, *price, *late, own.counts_delayed, own.copy], float
        )

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        prefills, look = prefill_kernel(), offers.look
        reuse_blocks, found = prefills.faster(offers.columns, prompt.num_tokens, prompt.block_size, prompt.best_blocks)
        load_s, transfer_s, prefill_s, ttft_s, _ = found
        rows = _worth_a_look(ttft_s)
        rank, queue_s, added_s, ttft_s, score = prefills.weigh(
            found,
            offers.queue_s,
            rows,
            look.records(rows),
            self._numbers,
            now=look.now,
            slo_s=prompt.ttft_slo_s,
            limits=look.limits,
            shift_s=look.shift_s,
        )
        return Weighed(reuse_blocks, load_s, transfer_s, prefill_s, ttft_s, score, rank, queue_s, added_s)


def _worth_a_look(ttft_s: Floats) -> Ints:
    """Rows of the instances that would be best in order of arrival."""
    if len(ttft_s) <= _MOST_EXACT:
        return np.arange(len(ttft_s))
    return np.argpartition(ttft_s, _MOST_EXACT)[:_MOST_EXACT]
