"""A token bucket as one number: the instant at which it will be full. Pure; `now` is an argument.

A bucket of capacity C refills at C per minute. What was taken and not yet refilled is (full_at − now) · rate, so that
an idle bucket needs no ticking, a debt is just a later instant, and all of it fits in one field of a Redis hash. In any
t seconds at most C · (1 + t/60) is taken. It is the virtual scheduling form of the leaky bucket (ITU-T I.371, annex A).
"""

from __future__ import annotations

from dataclasses import dataclass

MINUTE_S = 60.0
PRECISION_S = 1e-6
"""Whoever is so close to the instant is there: sums of doubles, and Redis' clock, are no more exact."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """`full_at` may lie in the past: it is full."""

    full_at: float = float("-inf")

    def level(self, capacity: int, now: float) -> float:
        """What can be taken; below 0 where more was taken than there was."""
        return capacity - max(0.0, self.full_at - now) * (capacity / MINUTE_S)

    def wait_s(self, amount: float, capacity: int, now: float) -> float:
        """Until so much can be taken; 0 = now. An amount above the capacity needs a full bucket."""
        spare_s = max(0.0, capacity - amount) / capacity * MINUTE_S
        wait_s = self.full_at - now - spare_s
        return wait_s if wait_s > PRECISION_S else 0.0

    def after(self, amount: float, capacity: int, now: float) -> Bucket:
        """With so much taken; given back where it is negative."""
        return Bucket(max(self.full_at, now) + amount / capacity * MINUTE_S)

    def full_in_s(self, now: float) -> float:
        return max(0.0, self.full_at - now)
