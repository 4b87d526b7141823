"""Who has fallen silent: a process that was stopped, or whose host hangs, closes nothing, and connections tell of it
only after many seconds. Pure.

Rule: a worker is taken for lost where neither the conductor nor this gateway has heard of it for a while, and another
one of its role was heard: where there is nobody else, waiting for it is the best that can be done. It may yet wake up;
what it then says of requests that have gone on elsewhere is not theirs any more.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from protocol.ids import Role

# Two heartbeats. Less would take workers on busy machines for dead, more adds to the longest gap in a stream.
SILENT_AFTER_S = 2.0
# One heartbeat and what it takes: whoever is silent for longer is worth another look soon.
LATE_AFTER_S = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Of one worker's life."""

    instance_id: str
    role: Role
    draining: bool
    last_heard_s: float  # ago, by the conductor
    last_word_s: float  # ago, on this gateway's stream


def silent(signs: Collection[Sign]) -> set[str]:
    """Those that are to be taken for lost."""
    roles = {s.role for s in signs if s.last_heard_s < LATE_AFTER_S and not s.draining}
    return {
        s.instance_id
        for s in signs
        if min(s.last_heard_s, s.last_word_s) >= SILENT_AFTER_S and s.role in roles
    }


def is_late(signs: Collection[Sign]) -> bool:
    """Somebody may be about to fall silent."""
    return any(s.last_heard_s >= LATE_AFTER_S for s in signs)
