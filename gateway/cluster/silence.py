"""Detection of silent workers: a stopped process or hanging host closes no connection for many seconds. Pure.

Rule: a worker counts as lost if neither the conductor nor this gateway has heard from it for a while and another worker
of its role was heard. If there is no other, waiting for it is the best option. A silent worker may wake up again; its
messages about requests that have moved elsewhere are then ignored.

That time depends on the lateness of workers that spoke again. Where many processes share few processors, heartbeats
come late; treating that as death would send requests from one live worker to the next until they are given up. It is
`SILENT_AFTER_S` if all workers are punctual.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from protocol.ids import Role

# Two heartbeats. Less would treat workers on busy machines as dead; more adds to the longest gap in a stream.
SILENT_AFTER_S = 2.0
# Factor on the longest lateness that ended by itself; a heartbeat due just before a look is late by one interval.
_MARGIN = 1.75
# By then the conductor removes an instance that it has not heard from, unless it has another lease.
_LONGEST_S = 5.0
_HALF_LIFE_S = 30.0  # of the observed lateness
# One heartbeat and its delay: a worker that is silent for longer is checked again soon.
LATE_AFTER_S = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Most recent sign of life of one worker."""

    instance_id: str
    role: Role
    draining: bool
    last_heard_s: float  # seconds since the conductor heard it
    last_word_s: float  # seconds since its last message on this gateway's stream


class Suspicion:
    """Lateness of one gateway's workers, and which of them count as lost. `now`: seconds, on any clock."""

    def __init__(self) -> None:
        self._heard_s: dict[str, float] = {}  # at the last look
        self._longest_s, self._seen_at = 0.0, 0.0  # longest lateness of workers that spoke again

    def silent(self, signs: Collection[Sign], now: float) -> set[str]:
        """Returns the ids of workers that count as lost."""
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
        """True if the worker has spoken since the last look."""
        return sign.last_heard_s < self._heard_s.get(sign.instance_id, 0.0)

    def _lateness_s(self, now: float) -> float:
        faded: float = 0.5 ** ((now - self._seen_at) / _HALF_LIFE_S)
        return self._longest_s * faded


def is_late(signs: Collection[Sign]) -> bool:
    """Returns True if any worker may be about to fall silent."""
    return any(s.last_heard_s >= LATE_AFTER_S for s in signs)
