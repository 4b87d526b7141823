"""What a placement policy decides: how much prefix each prefill instance would re-use, and which instance is best.

Policies see numbers only: a `Prompt` and the columns of all instances that may serve it (`Offers`, one row each). They
are stateless and deterministic. Ties between equal scores are broken by the caller: least recently chosen first.

A policy may also say in which order prompts wait at their instance: by arrival + *rank*, lowest first. A rank is in
seconds and not below 0: how much later others of rank 0 may arrive and still go before this one. So nobody starves, all
ranks 0 are the order of arrival, and a rank means the same on every clock. The column `queue_s` is what waits for a
rank that is behind all others; who gives lower ones takes the column for a first look at all instances and asks
`wait_s` or `look` of the few best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from conductor.columns import Floats, Ints, Words
from conductor.cost.queue import PrefillQueue
from conductor.native.prefills import QueueRecord


class Prompt(NamedTuple):
    """What is to be prefilled."""

    num_tokens: int
    block_size: int
    best_blocks: int  # longest prefix in any store node
    request_id: str = ""
    # What its conversation's other requests have too; only for policies `by_session`.
    session: bytes = b""
    ttft_slo_s: float = math.inf


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
    # Seconds that a prompt of this rank waits at the instance of this row, exactly, and how many prompts it would go
    # before there, or before the rest of them: O(log of what waits).
    look: Callable[[int, float], tuple[float, int]] = lambda _row, _rank: (0.0, 0)

    def wait_s(self, row: int, rank: float) -> float:
        """The first of `look`."""
        return self.look(row, rank)[0]

    @property
    def columns(self) -> tuple[Ints | Floats, ...]:
        """`device_blocks` to `c2`."""
        return self[2:10]

    def prefill_s(self, prompt: Prompt, cached_blocks: Ints | int) -> Floats:
        """`PrefillProfile.seconds` of every instance."""
        num_tokens, cached = prompt.num_tokens, cached_blocks * prompt.block_size
        seconds: Floats = (
            self.c0
            + self.c1 * (num_tokens - cached)
            + self.c2 * (num_tokens * num_tokens - cached * cached)
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


class Looks:
    """`Offers.look` at the books themselves, which can be asked for several instances at once."""

    __slots__ = ("_queue", "now")

    def __init__(self, queue: Callable[[int], PrefillQueue], now: float) -> None:
        """`queue`: of the instance of a row."""
        self._queue = queue
        self.now = now

    def __call__(self, row: int, rank: float) -> tuple[float, int]:
        return self._queue(row).look(self.now, rank)

    def records(self, rows: Sequence[int]) -> list[QueueRecord]:
        """What waits at these instances now."""
        return [self._queue(row).record() for row in rows]


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
