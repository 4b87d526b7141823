"""What a TTFT has beside queue, prefix and computing: submission, a landing's grant, the first token's way back. Pure.

Two running middles of what first tokens reported. `request_s` every prompt pays; `landing_s` only as far as it does not
wait for others anyway, since landings are asked for while those compute. Both are 0 until something was reported.

    x ← x + w · clip(log(actual + ε) − x, ±C),   seconds = exp(x) − ε

is the estimate of `correction`, for the same reason: one wild report moves it by at most 6 %. Knows no instance: the
way there and back is the gateway's and the network's.
"""

from __future__ import annotations

import math

from conductor.cost.accuracy import Times
from conductor.cost.correction import CLIP, WEIGHT

_EPSILON_S = 1e-4  # below it nobody asks, and some report nothing at all


class Middle:
    """One running middle, in seconds."""

    __slots__ = ("_log", "seconds")

    def __init__(self) -> None:
        self._log: float | None = None
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        if not math.isfinite(seconds):
            return
        found = math.log(max(seconds, 0.0) + _EPSILON_S)
        if self._log is None:
            self._log = found
        else:
            self._log += WEIGHT * min(max(found - self._log, -CLIP), CLIP)
        self.seconds = max(math.exp(self._log) - _EPSILON_S, 0.0)

    def fade(self, share: float) -> None:
        """So much of it is believed from now on."""
        if self._log is not None and share < 1.0:
            self.seconds *= share
            self._log = math.log(self.seconds + _EPSILON_S)

    def validate(self) -> None:
        assert math.isfinite(self.seconds)
        assert self.seconds >= 0.0


class Overhead:
    """Of all requests."""

    __slots__ = ("_landing", "_request", "taught_at")

    def __init__(self) -> None:
        self._request = Middle()
        self._landing = Middle()
        self.taught_at = -math.inf  # when something was reported last

    def observe(self, actual: Times, now: float, *, lands_only: bool) -> None:
        """A first token, as its prefill worker reported it. `lands_only`: its transfer was a landing being granted:
        there was no prefix to load and blocks were free, which are other terms."""
        if actual.queue_s is None or actual.transfer_s is None or actual.prefill_s is None:
            return
        self.taught_at = now
        terms_s = actual.queue_s + actual.transfer_s + actual.prefill_s
        self._request.observe(actual.ttft_s - terms_s)
        if lands_only:
            self._landing.observe(actual.transfer_s)

    def fade(self, share: float) -> None:
        """So much of it is believed from now on, 0 to 1."""
        self._request.fade(share)
        self._landing.fade(share)

    @property
    def request_s(self) -> float:
        """To be added for a prompt that needs no landing."""
        return self._request.seconds

    def seconds(self, queue_s: float) -> float:
        """To be added for a prompt that waits so long for others."""
        return self._request.seconds + max(self._landing.seconds - queue_s, 0.0)

    def validate(self) -> None:
        self._request.validate()
        self._landing.validate()
