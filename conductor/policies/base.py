"""What a placement policy decides: how much prefix each prefill instance would re-use, and which instance is best.

Policies see numbers only: a `Prompt` and the columns of all instances that may serve it (`Offers`, one row each). They
are stateless and deterministic. Ties between equal scores are broken by the caller: least recently chosen first.

A policy may also say in which order prompts wait at their instance: by arrival + *rank*, lowest first. A rank is in
seconds and not below 0: how much later others of rank 0 may arrive and still go before this one. So nobody starves, all
ranks 0 are the order of arrival, and a rank means the same on every clock. The column `queue_s` is what waits for a
rank that is behind all others; who gives lower ones takes the column for a first look at all instances and asks `look`
of the few best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from conductor.columns import Floats, Ints, Words
from conductor.members import Instance


class Prompt(NamedTuple):
    """What is to be prefilled."""

    num_tokens: int
    block_size: int
    best_blocks: int  # longest prefix in any store node
    request_id: str = ""
    # What its conversation's other requests have too; only for policies `by_session`.
    session: bytes = b""
    ttft_slo_s: float = math.inf


class Looks:
    """What waits at the instances, exactly, for a prompt whose rank counts as no more than the limit of the row (None =
    none has one) and whose places are shifted by so many seconds (`conductor.fairness.turns`)."""

    __slots__ = ("_instances", "limits", "now", "shift_s")

    def __init__(
        self,
        instances: Sequence[Instance],
        now: float,
        limits: Floats | None = None,
        shift_s: float = 0.0,
    ) -> None:
        self._instances, self.now, self.limits, self.shift_s = instances, now, limits, shift_s

    def __call__(self, row: int, rank: float) -> tuple[float, int]:
        """Seconds that a prompt of this rank waits at the instance of this row, and how many prompts it would go before
        there, or before the rest of them: O(log of what waits)."""
        if self.limits is not None:
            rank = min(rank, float(self.limits[row]))
        return self._instances[row].queue.look(self.now, rank + self.shift_s)

    def records(self, rows: Ints) -> Words:
        """Where `Queue`s of prefills.c lie, of these instances: until the next change."""
        instances = self._instances
        return np.array([instances[row].queue.record() for row in rows.tolist()], np.uint64)

    def in_turn(self, limits: Floats | None, shift_s: float) -> Looks:
        return Looks(self._instances, self.now, limits, shift_s)


class Offers(NamedTuple):
    """The prefill instances' situation with regard to one prompt."""

    identity: Words  # digests of the instances' ids
    chosen_at: Ints  # number of the placement that last went there; 0 = none yet
    device_blocks: Ints
    prefix_blocks: Ints  # ≥ device_blocks: continued by the home store node
    queue_s: Floats  # until all that is there now is prefilled: the wait in order of arrival
    local_s_per_block: Floats  # from the home store node
    # From the best store node, beside all that is on its way: each block's share of all that are missing.
    remote_s_per_block: Floats
    c0: Floats  # of the prefill profiles
    c1: Floats
    c2: Floats
    now: float  # monotonic seconds
    look: Looks = Looks((), 0.0)

    @property
    def columns(self) -> tuple[Ints | Floats, ...]:
        """`device_blocks` to `c2`."""
        return self[2:10]

    def prefill_s(self, prompt: Prompt, cached_blocks: Ints | int) -> Floats:
        """`PrefillProfile.seconds` of every instance."""
        num_tokens, cached = prompt.num_tokens, cached_blocks * prompt.block_size
        seconds: Floats = (
            self.c0 + self.c1 * (num_tokens - cached) + self.c2 * (num_tokens * num_tokens - cached * cached)
        )
        return seconds


class Weighed(NamedTuple):
    """All terms of the prediction for every instance, and who is best."""

    reuse_blocks: Ints  # would not be computed
    load_s: Floats
    transfer_s: Floats
    prefill_s: Floats
    ttft_s: Floats
    score: Floats | Ints  # the smallest is chosen
    # Seconds by which it yields; None: 0 everywhere, in order of arrival.
    rank: Floats | None = None
    queue_s: Floats | None = None  # that `ttft_s` counts on; None: the offers' column
    added_s: Floats | None = None  # by which others would wait longer, together; for the record

    def by(self, score: Floats | Ints) -> Weighed:
        return self._replace(score=score)


class PlacementPolicy(Protocol):
    """A way to choose the prefill instance."""

    @property
    def name(self) -> str: ...

    @property
    def balancing_threshold(self) -> float | None:
        """For the record of decisions; None where the policy has none."""

    @property
    def by_session(self) -> bool:
        """Whether it wants to know the prompt's session."""

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        """All terms of the prediction, and the score, of all instances."""


def predict(prompt: Prompt, offers: Offers, reuse_blocks: Ints) -> Weighed:
    """The terms of running `prompt` with `reuse_blocks` leading blocks not computed; the score is the TTFT."""
    local_blocks = (offers.prefix_blocks - offers.device_blocks).astype(np.float64)
    load_s = local_blocks * offers.local_s_per_block
    transfer_s: Floats = (reuse_blocks - offers.prefix_blocks) * offers.remote_s_per_block
    prefill_s = offers.prefill_s(prompt, reuse_blocks)
    ttft_s = load_s + transfer_s + offers.queue_s + prefill_s
    return Weighed(reuse_blocks, load_s, transfer_s, prefill_s, ttft_s, ttft_s)


def predict_unfetched(prompt: Prompt, offers: Offers) -> Weighed:
    """Where every instance uses what it has by itself: its device cache and its home store node."""
    return predict(prompt, offers, offers.prefix_blocks)
