"""Time limits of client calls. Every call is bounded; the default limit grows with the bytes to move."""

import math
import time

from moonserve.kvstore.state.objects import MAX_TTL_S
from moonserve.protocol.errors import DeadlineExceeded, InvalidRequest
from moonserve.transfer.config import TransferTimeout

PATIENCE = TransferTimeout()
# A right outlasts its user's deadline a little, so that the node never ends it first.
TTL_MARGIN_S = 5.0
ROUND_ABOVE_S = 4.0
AMPLE_S = 0.25
"""Seconds within which a live node answers, even on a busy machine. A slower node is believed to be dead."""


class Deadline:
    """Deadline that starts now. Without `timeout_s`, `PATIENCE` sets it from the bytes known so far."""

    __slots__ = ("_ends_at", "_limit_s", "_nbytes", "_of", "_own")

    def __init__(self, timeout_s: float | None, nbytes: int = 0) -> None:
        """Raises InvalidRequest unless `timeout_s` is above 0."""
        if timeout_s is not None and not timeout_s > 0:
            raise InvalidRequest(f"timeout_s must be above 0, not {timeout_s}", param="timeout_s")
        self._own = timeout_s is None
        self._nbytes = nbytes
        self._of: Deadline | None = None
        self._limit_s = PATIENCE.deadline_s(nbytes) if timeout_s is None else timeout_s
        self._ends_at = time.monotonic() + self._limit_s

    def extend_for_bytes(self, nbytes: int) -> None:
        """Extends the deadline once the number of bytes to move is known; no-op if the caller has set `timeout_s`."""
        if self._own and nbytes > self._nbytes:
            self._ends_at += (nbytes - self._nbytes) / PATIENCE.slowest_bytes_s
            self._nbytes = nbytes
            if self._of is not None:
                self._of.extend_for_bytes(nbytes)

    def left_s(self) -> float:
        """Returns the seconds left, above 0. Raises DeadlineExceeded."""
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("the deadline passed before the operation was complete")
        return left_s

    def call_s(self) -> float:
        """Returns `left_s` for a call, rounded up if long, since a new socket timeout costs two system calls."""
        left_s = self.left_s()
        return left_s if left_s < ROUND_ABOVE_S else float(math.ceil(left_s))

    def half_left(self) -> "Deadline":
        """Returns a deadline of half the time left, to leave time for other attempts. Extending it extends both."""
        attempt = Deadline(self.left_s() / 2)
        attempt._own, attempt._nbytes, attempt._of = self._own, self._nbytes, self
        return attempt

    def was_ample(self) -> bool:
        """True if a failed attempt failed by itself, not because the caller gave it hardly any time."""
        return self._limit_s >= AMPLE_S or time.monotonic() < self._ends_at


def ttl_for(needed_s: float) -> float:
    """Returns the seconds that a right must last if it is needed for `needed_s`."""
    return min(needed_s + TTL_MARGIN_S, MAX_TTL_S)
