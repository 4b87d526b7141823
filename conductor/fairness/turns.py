"""Limits a prompt's rank at each instance by its tenant's turn, and shifts it by its priority. Pure.

Stands between the queues and a placement policy. The policy sees the waits that this prompt would have and gives a rank
as if there were no turns or priorities. The prompt is placed with the lower of that rank and the turn's limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from conductor.columns import Floats, Ints
from conductor.fairness.shares import Fairness, Turn
from conductor.policies.base import Offers

# Seconds that one priority step counts in a place; all ranks and waits are shorter. More than MOST_PRIORITY steps would
# make places too large for a float to resolve a microsecond, so priorities are clamped here. Workers tell more apart.
PRIORITY_STEP_S = 1e6
MOST_PRIORITY = 1000


class Queueing(NamedTuple):
    """Queueing terms of one prompt at every instance that may serve it."""

    turn: Turn
    now: float
    priority: int  # 0 if priorities are not used
    limit: Floats | None  # highest rank that its turn allows at each instance; None = any

    @property
    def shift_s(self) -> float:
        """Seconds that its priority adds to its places."""
        return self.priority * PRIORITY_STEP_S

    def rank(self, row: int, rank: float, tie_s: Callable[[float], float]) -> float:
        """Returns the final rank at `row` for the policy's `rank`. `tie_s`: gives the seconds to add to a place so that
        it follows prompts at the same place."""
        rank += tie_s(self.now + rank + self.shift_s)
        return rank if self.limit is None else min(rank, float(self.limit[row]))


def queueing(fairness: Fairness, tenant: str, priority: int, links: Ints, now: float) -> Queueing:
    """Returns the queueing terms of a request that is placed now. `links`: of the instances that may serve it."""
    priority = max(-MOST_PRIORITY, min(priority, MOST_PRIORITY))
    turn = fairness.turn(tenant)
    places = fairness.places_to_take(turn, priority, links)
    limit = None
    if places is not None:
        limit = places - (priority * PRIORITY_STEP_S + now)
    return Queueing(turn, now, priority, limit)


def offers_in_turn(offers: Offers, own: Queueing, *, passes_others: bool) -> Offers:
    """Returns the offers with the waits that this prompt would have. `passes_others`: if less urgent prompts wait."""
    if own.limit is None and own.priority == 0 and not passes_others:
        return offers
    last_s = PRIORITY_STEP_S / 2  # behind all prompts of its priority
    limits = np.full(len(offers.queue_s), last_s) if own.limit is None else np.minimum(own.limit, last_s)
    look = offers.look.in_turn(limits, own.shift_s)
    queue_s = offers.queue_s.copy()
    rows = range(len(limits)) if passes_others else np.flatnonzero(limits < last_s).tolist()
    for row in rows:
        queue_s[row], _ = look(row, last_s)
    return offers._replace(queue_s=queue_s, look=look)
