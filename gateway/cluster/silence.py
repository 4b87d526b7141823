"""Who has fallen silent: a process that was stopped, or whose host hangs, closes nothing, and connections tell of it
only after many seconds. Pure.

Rule: a worker is taken for lost where neither the conductor nor this gateway has heard of it for a while, and another
one of its role was heard: where there is nobody else, waiting for it is the best that can be done. It may yet wake up;
what it then says of requests that have gone on elsewhere is not theirs any more.

How long that while is depends on how late workers were that spoke again: where many processes share few processors,
heartbeats come late, and whoever took that for death would send requests from one living worker to the next until they
are given up. It is `SILENT_AFTER_S` where all are punctual.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from protocol.ids import Role

# Two heartbeats. Less would take workers on busy machines for dead, more adds to the longest gap in a stream.
SILENT_AFTER_S = 2.0
# Times the longest lateness that ended by itself; a heartbeat that was due just before a look is late by one interval.
_MARGIN = 1.75
# The conductor removes by then what it has not heard of, unless it was told another lease.
_LONGEST_S = 5.0
_HALF_LIFE_S = 30.0  # of what was seen of lateness
# One heartbeat and what it takes: whoever is silent for longer is worth another look soon.
LATE_AFTER_S = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Sign of one worker's life."""

    instance_id: str
    role: Role
    draining: bool
    last_heard_s: float  # ago, by the conductor
    last_word_s: float  # ago, on this gateway's stream


class Suspicion:
    """What one gateway has seen of its workers' lateness, and whom it takes for lost. `now`: seconds, on any clock."""

    def __init__(self) -> None:
        self._heard_s: dict[str, float] = {}  # at the last look
        self._longest_s, self._seen_at = 0.0, 0.0  # of those that spoke again

    def silent(self, signs: Collection[Sign], now: float) -> set[str]:
        """Those that are to be taken for lost."""
        self._learn(signs, now)
        after_s = min(max(SILENT_AFTER_S, _MARGIN * self._lateness_s(now)), _LONGEST_S)
        roles = {s.role for s in signs if s.last_heard_s < LATE_AFTER_S and not s.draining}
        return {s.instance_id for s in signs if min(s.last_heard_s, s.last_word_s) >= after_s and s.role in roles}

    def _learn(self, signs: Collection[Sign], now: float) -> None:
        again = [self._heard_s.get(s.instance_id, 0.0) for s in signs if self._spoke(s)]
        if (longest_s := max(again, default=0.0)) > self._lateness_s(now):
            self._longest_s, self._seen_at = longest_s, now
        self._heard_s = {s.instance_id: s.last_heard_s for s in signs}

    def _spoke(self, sign: Sign) -> bool:
        """Since the last look."""
        return sign.last_heard_s < self._heard_s.get(sign.instance_id, 0.0)

    def _lateness_s(self, now: float) -> float:
        faded: float = 0.5 ** ((now - self._seen_at) / _HALF_LIFE_S)
        return self._longest_s * faded


def is_late(signs: Collection[Sign]) -> bool:
    """Somebody may be about to fall silent."""
    return any(s.last_heard_s >= LATE_AFTER_S for s in signs)
