"""Interface of placement policies: how much prefix each prefill instance would re-use, and which instance is best.

Policies see numbers only: a `Prompt` and the columns of all instances that may serve it (`PrefillCandidates`, one row
each). They are deterministic, but may learn from what they weigh. The caller breaks ties between equal scores: least
recently chosen first.

A policy may also set the order in which prompts wait at their instance: by arrival + *rank*, lowest first. A rank is in
seconds and at least 0. Prompts of rank 0 that arrive within this time after the prompt still run before it. So no
prompt starves, ranks of 0 mean the order of arrival, and a rank means the same on every clock. The column `queue_s` is
the wait behind all queued prompts. A policy that gives ranks uses this column to preselect instances, and calls
`queue_waits` for the exact waits of the few best.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from moonserve.conductor.members import Instance
from moonserve.conductor.placement.tenant_fairness import BURST_S
from moonserve.conductor.prediction.instance_table import Floats, Ints, Words


class Prompt(NamedTuple):
    """The prompt to place."""

    num_tokens: int
    block_size: int
    best_blocks: int  # longest prefix in any store node
    request_id: str = ""
    session: bytes = b""  # equal for all requests of a conversation; only set for policies `by_session`
    ttft_slo_s: float = math.inf
    rejected_if_late: bool = True  # by admission; otherwise it is served late


@dataclass(slots=True, eq=False)
class QueueWaits:
    """Exact queue waits at the instances. The rank of the prompt is limited per row (None = no limits) and its places
    are shifted by `shift_s` seconds (`conductor.placement.candidates`)."""

    instances: Sequence[Instance]
    now: float
    limits: Floats | None = None
    shift_s: float = 0.0

    def __call__(self, row: int, rank: float) -> tuple[float, int]:
        """Returns the seconds that a prompt of this rank waits at the instance of this row, and the number of prompts,
        the running one included, that it would overtake. O(log n) in the number of waiting prompts."""
        rank += BURST_S  # earlier prompts at the same instant come first
        if self.limits is not None:
            rank = min(rank, float(self.limits[row]))
        return self.instances[row].queue.wait_for(self.now, rank + self.shift_s)

    def records(self, rows: Ints) -> Words:
        """Returns the addresses of these instances' `Queue` structs of prefills.c; valid until the next change."""
        return np.array([self.instances[row].queue.native_record() for row in rows.tolist()], np.uint64)


class PrefillCandidates(NamedTuple):
    """Cached blocks, waits and costs of every prefill instance for one prompt."""

    identity: Words  # digests of the instances' ids
    chosen_at: Ints  # number of the placement that last chose it; 0 = none yet
    device_blocks: Ints  # leading blocks in the device cache
    prefix_blocks: Ints  # ≥ device_blocks: continued by the home store node
    queue_s: Floats  # until all queued work is prefilled: the wait in order of arrival
    local_s_per_block: Floats  # from the home store node
    # From the best store node, next to all transfers in flight: time for all missing blocks ÷ their number.
    remote_s_per_block: Floats
    c0: Floats  # c0 to c2: corrected prefill profiles
    c1: Floats
    c2: Floats
    now: float  # monotonic seconds
    queue_waits: QueueWaits = QueueWaits((), 0.0)

    @property
    def columns(self) -> tuple[Ints | Floats, ...]:
        """The columns `device_blocks` to `c2`."""
        return self[2:10]

    def prefill_s(self, prompt: Prompt, cached_blocks: Ints | int) -> Floats:
        """Returns the prefill time of every instance; `PrefillProfile.seconds` by row."""
        num_tokens, cached = prompt.num_tokens, cached_blocks * prompt.block_size
        seconds: Floats = (
            self.c0 + self.c1 * (num_tokens - cached) + self.c2 * (num_tokens * num_tokens - cached * cached)
        )
        return seconds


class Scores(NamedTuple):
    """All terms of the prediction for every instance, and the score."""

    reuse_blocks: Ints  # leading blocks that would not be computed
    load_s: Floats
    transfer_s: Floats
    prefill_s: Floats
    ttft_s: Floats
    score: Floats | Ints  # the smallest is chosen
    rank: Floats | None = None  # seconds by which it yields; None = 0 everywhere, the order of arrival
    queue_s: Floats | None = None  # wait included in `ttft_s`; None = the offers' column
    added_s: Floats | None = None  # total delay of other prompts; for the decision record

    def with_score(self, score: Floats | Ints) -> "Scores":
        return self._replace(score=score)


class PlacementPolicy(Protocol):
    """Chooses the prefill instance of a prompt."""

    @property
    def name(self) -> str: ...

    @property
    def balancing_threshold(self) -> float | None:
        """Threshold shown in the decision record; None if the policy has none."""

    @property
    def by_session(self) -> bool:
        """True if the policy needs `Prompt.session`."""

    def weigh(self, prompt: Prompt, offers: PrefillCandidates) -> Scores:
        """Returns all prediction terms and the score of every instance."""


def predict(prompt: Prompt, offers: PrefillCandidates, reuse_blocks: Ints) -> Scores:
    """Predicts a prefill that does not compute the leading `reuse_blocks`, on every instance; the score is the TTFT."""
    local_blocks = (offers.prefix_blocks - offers.device_blocks).astype(np.float64)
    load_s = local_blocks * offers.local_s_per_block
    transfer_s: Floats = (reuse_blocks - offers.prefix_blocks) * offers.remote_s_per_block
    prefill_s = offers.prefill_s(prompt, reuse_blocks)
    ttft_s = load_s + transfer_s + offers.queue_s + prefill_s
    return Scores(reuse_blocks, load_s, transfer_s, prefill_s, ttft_s, ttft_s)


def predict_unfetched(prompt: Prompt, offers: PrefillCandidates) -> Scores:
    """Predicts a prefill that re-uses only blocks in the instance's device cache and home store node."""
    return predict(prompt, offers, offers.prefix_blocks)
