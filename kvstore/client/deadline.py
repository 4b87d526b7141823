"""How long one call may still take. Bounded for every call; longer by itself only as its bytes turn out to be many."""

from __future__ import annotations

import math
import time

from kvstore.promises import MAX_TTL_S
from protocol.errors import DeadlineExceeded, InvalidRequest
from transfer.config import Patience

PATIENCE = Patience()
# A right lasts a little longer than the deadline of its user, so that the node never ends it first.
TTL_MARGIN_S = 5.0
ROUNDED_S = 4.0
FAIR_S = 0.25
"""A node on a busy machine answers within it; one that does not is not believed to be alive."""


class Deadline:
    """From now on. Without `timeout_s` it is what `PATIENCE` allows for the bytes that are known so far."""

    __slots__ = ("_ends_at", "_limit_s", "_nbytes", "_of", "_own")

    def __init__(self, timeout_s: float | None, nbytes: int = 0) -> None:
        """Raises InvalidRequest for a time that is none."""
        if timeout_s is not None and not timeout_s > 0:
            raise InvalidRequest(f"timeout_s must be above 0, not {timeout_s}", param="timeout_s")
        self._own = timeout_s is None
        self._nbytes = nbytes
        self._of: Deadline | None = None
        self._limit_s = PATIENCE.deadline_s(nbytes) if timeout_s is None else timeout_s
        self._ends_at = time.monotonic() + self._limit_s

    def allow(self, nbytes: int) -> None:
        """So many bytes are to be moved, it turns out; no-op when the caller has set the time."""
        if self._own and nbytes > self._nbytes:
            self._ends_at += (nbytes - self._nbytes) / PATIENCE.slowest_bytes_s
            self._nbytes = nbytes
            if self._of is not None:
                self._of.allow(nbytes)

    def left_s(self) -> float:
        """Above 0. Raises DeadlineExceeded."""
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("the deadline passed before the operation was complete")
        return left_s

    def call_s(self) -> float:
        """`left_s` for a call: long ones rounded up, since another time limit costs a socket two system calls."""
        left_s = self.left_s()
        return left_s if left_s < ROUNDED_S else float(math.ceil(left_s))

    def half(self) -> Deadline:
        """Of what is left, for an attempt that leaves time for others. What it allows, this one allows."""
        attempt = Deadline(self.left_s() / 2)
        attempt._own, attempt._nbytes, attempt._of = self._own, self._nbytes, self
        return attempt

    def fair(self) -> bool:
        """Whether what has failed did so by itself, and not because the caller gave it hardly any time."""
        return self._limit_s >= FAIR_S or time.monotonic() < self._ends_at

    def ttl_s(self) -> float:
        """How long a right must last that the rest of this call needs."""
        return right_s(self.left_s())


def right_s(needed_s: float) -> float:
    """How long a right must last that is needed for `needed_s`."""
    return min(needed_s + TTL_MARGIN_S, MAX_TTL_S)
