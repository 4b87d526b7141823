"""Where a prompt may wait at each instance: before whom its tenant's turn puts it, and its priority. Pure.

Puts a `Turn` and a priority between the books and a policy: the policy is told of waits as they would be for this
prompt, and gives a rank as if there were neither; what is placed has the lower of that rank and the turn's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from conductor.columns import Floats, Ints
from conductor.fairness.shares import Fairness, Turn
from conductor.policies.base import Offers

# Seconds that one step of priority counts in a book: all ranks and waits are shorter. With MOST_PRIORITY steps a
# microsecond still makes a difference to a place, which is why the books tell no more of them apart; workers do.
PRIORITY_STEP_S = 1e6
MOST_PRIORITY = 1000


class Queueing(NamedTuple):
    """How one prompt waits, at every instance that may serve it."""

    turn: Turn
    now: float
    priority: int  # 0 where priorities do not count
    limit: Floats | None  # highest rank that its turn allows at each instance; None = any

    @property
    def shift_s(self) -> float:
        """Of its places in the books."""
        return self.priority * PRIORITY_STEP_S

    def rank(self, row: int, rank: float, tie_s: Callable[[float], float]) -> float:
        """With which it waits where the policy gave `rank`. `tie_s`: by which it follows those at the same place."""
        rank += tie_s(self.now + rank + self.shift_s)
        return rank if self.limit is None else min(rank, float(self.limit[row]))


def queueing(fairness: Fairness, tenant: str, priority: int, links: Ints, now: float) -> Queueing:
    """Of a request that is placed now. `links`: of the instances that may serve it."""
    priority = max(-MOST_PRIORITY, min(priority, MOST_PRIORITY))
    turn = fairness.turn(tenant)
    places = fairness.places_to_take(turn, priority, links)
    limit = None
    if places is not None:
        limit = places - (priority * PRIORITY_STEP_S + now)
    return Queueing(turn, now, priority, limit)


def offers_in_turn(offers: Offers, own: Queueing, *, passes_others: bool) -> Offers:
    """As they are for a prompt that waits like this. `passes_others`: some are of less urgent priority."""
    if own.limit is None and own.priority == 0 and not passes_others:
        return offers
    last_s = PRIORITY_STEP_S / 2  # behind all of its priority
    limits = np.full(len(offers.queue_s), last_s) if own.limit is None else np.minimum(own.limit, last_s)
    look = offers.look.in_turn(limits, own.shift_s)
    queue_s = offers.queue_s.copy()
    rows = range(len(limits)) if passes_others else np.flatnonzero(limits < last_s).tolist()
    for row in rows:
        queue_s[row], _ = look(row, last_s)
    return offers._replace(queue_s=queue_s, look=look)
