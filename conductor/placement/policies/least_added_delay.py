"""Default placement policy `moonserve`: minimizes the delay that a prompt adds, its own and that of overtaken prompts.

Mean TTFT is proportional to the sum of all delays. So a placement costs its own TTFT plus its prefill time for each
prompt that it delays (Smith 1956: on one machine, shortest first is then the best order). There are six terms, all
from predictions that the conductor has anyway. Answer lengths and later arrivals are not used.

1. *Order.* A prompt yields for `patience` times its own prefill time: shortest first, but prompts that arrive later
   than that do not overtake, so none starves. If prefill times vary a lot, the exact value hardly matters.
2. *Objective.* A prompt never yields longer than its TTFT objective allows, given the queue. With long queues it does
   not yield at all and the order is that of arrival, so prompts admitted in time stay in time.
3. *Price.* Prefill seconds are scarce if many prompts wait. A prompt is too expensive if its prefill takes longer than
   objective × (1 − queue / objective)^`steepness`. It goes behind all others (for at most `late` objectives), where an
   idle moment may still serve it in time. Its predicted TTFT exceeds the objective, so that admission, if enabled,
   rejects it: then the power is high, since a long prompt makes several others late. Without admission a long prompt
   takes its time sooner or later, so only prompts go behind that would be late anyway (a power of 1): fewer wait long.
4. *Order of arrival.* Where late prompts are served, the p99 of the TTFT should hardly be above that in order of
   arrival (`bound` in prefills.c). So a prompt yields at most for half of the instances' mean wait; a short one also at
   most until the 99 percent quantile of the TTFT in that order; a late one until its own TTFT there. Only late prompts
   among the longest 0.7 percent yield for longer, twice as long as above: they take the most time of others.
5. *Place.* The instance with the smallest own TTFT + prefill time × number of delayed prompts is chosen. Prefixes are
   fetched as in Algorithm 1 (FAST'25), but without a threshold: if fetching is predicted to be faster than computing.
6. *Copies.* An instance without the best prefix would store another copy, which evicts another prefix from a full pool.
   This adds `copy` × the time to compute those blocks, so that among similar instances a holder is chosen.

The constants were tuned on synthetic traces (`traces.workload`); those of term 4 also on rows of the table in
docs/policies.md, which compares the policy with Algorithm 1 and shows the effect of each term.
"""

from dataclasses import dataclass

import numpy as np

from moonserve.conductor.placement.policies.base import PrefillCandidates, Prompt, Scores
from moonserve.conductor.prediction.c_bindings import prefill_kernel
from moonserve.conductor.prediction.instance_table import Floats, Ints

# Number of instances whose queues are examined exactly: those with the smallest TTFT in order of arrival.
_MAX_EXACT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the policy's terms."""

    # Multiple of the prompt's prefill time. From 2 to 50, mean TTFTs are within 3 % of each other.
    patience: float = 5.0
    keeps_objective: bool = True
    steepness: float | None = 4.0  # of prompts that admission rejects; 3 to 6 differ little; None = no price
    served_steepness: float | None = 1.0  # of prompts that are served late
    late: float = 7.0  # objectives that a too expensive prompt yields for: with 30, p99s are higher
    late_patience: float = 17.0  # `patience` among too expensive prompts: the longest wait longest
    counts_delayed: bool = True
    by_arrival: bool = True  # bounds ranks by waits and TTFTs in order of arrival
    copy: float = 0.1  # 0.3 saves half of all fetches, but raises the mean TTFT of idle clusters by 1 %


class LeastAddedDelay:
    """Policy of `--placement-policy moonserve`."""

    name = "moonserve"
    balancing_threshold: float | None = None
    by_session = False

    def __init__(self, terms: Weights | None = None) -> None:
        own = terms or Weights()
        self._if_rejected, self._if_served = _numbers(own, own.steepness), _numbers(own, own.served_steepness)
        # Struct `ArrivalOrder` of prefills.c, learned from placements.
        self.arrival_order = np.array([1.0, 1.0, 0.0, 0.0]) if own.by_arrival else None

    def weigh(self, prompt: Prompt, offers: PrefillCandidates) -> Scores:
        prefills, waits = prefill_kernel(), offers.queue_waits
        reuse_blocks, found = prefills.faster(offers.columns, prompt.num_tokens, prompt.block_size, prompt.best_blocks)
        load_s, transfer_s, prefill_s, ttft_s, _ = found
        rows = _shortest_ttft(ttft_s)
        rank, queue_s, added_s, ttft_s, score = prefills.weigh(
            found,
            offers.queue_s,
            rows,
            waits.records(rows),
            self._if_rejected if prompt.rejected_if_late else self._if_served,
            None if prompt.rejected_if_late else self.arrival_order,
            now=waits.now,
            slo_s=prompt.ttft_slo_s,
            limits=waits.limits,
            shift_s=waits.shift_s,
        )
        return Scores(reuse_blocks, load_s, transfer_s, prefill_s, ttft_s, score, rank, queue_s, added_s)


def _numbers(own: Weights, steepness: float | None) -> Floats:
    """Returns the weights in the order of `Terms` of prefills.c."""
    price, late = (steepness is not None, steepness or 0.0), (own.late, own.late_patience)
    return np.array([own.patience, own.keeps_objective, *price, *late, own.counts_delayed, own.copy], float)


def _shortest_ttft(ttft_s: Floats) -> Ints:
    """Returns the rows of the instances with the smallest TTFT in order of arrival."""
    if len(ttft_s) <= _MAX_EXACT:
        return np.arange(len(ttft_s))
    return np.argpartition(ttft_s, _MAX_EXACT)[:_MAX_EXACT]
