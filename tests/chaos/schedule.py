"""When what is done to whom: a function of the seed, the length and the cluster's processes. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

FIRST_AT_S = 4.0
"""The clients are under way by then."""
MEAN_PAUSE_S = 5.0
QUIET_END_S = 10.0
"""Before the end nothing new happens: what was restarted serves again."""
SHORTEST_STOP_S, LONGEST_STOP_S = 0.2, 20.0


class Kind(StrEnum):
    """Of a fault."""

    KILL = "kill"  # SIGKILL; the launcher starts it again
    STOP = "stop"  # SIGSTOP, and SIGCONT later
    RESET = "reset"  # all of its TCP connections are reset, of which it is the server
    DISK = "disk"  # bytes of the store's disk change, or a file of it is cut off


WEIGHTS = {Kind.KILL: 4, Kind.STOP: 3, Kind.RESET: 3, Kind.DISK: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One blow."""

    at_s: float  # since the clients began
    kind: Kind
    victim: str  # instance id
    lasts_s: float = 0.0  # of a stop
    chance: int = 0  # for whatever else it needs


def schedule(seed: int, duration_s: float, victims: Sequence[str]) -> list[Fault]:
    """In order. `victims`: instance ids; only those that begin with "store" have a disk."""
    dice = random.Random(seed)
    stores = [name for name in victims if name.startswith("store")]
    faults: list[Fault] = []
    at_s = FIRST_AT_S
    while at_s < duration_s - QUIET_END_S:
        kind = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if kind is Kind.DISK and not stores:
            kind = Kind.KILL
        # Most stops are shorter than anybody's patience, some longer than everybody's.
        lasts_s = min(LONGEST_STOP_S, SHORTEST_STOP_S + dice.expovariate(1 / 4))
        faults.append(
            Fault(
                at_s=at_s,
                kind=kind,
                victim=dice.choice(stores if kind is Kind.DISK else list(victims)),
                lasts_s=min(lasts_s, duration_s - QUIET_END_S - at_s) if kind is Kind.STOP else 0.0,
                chance=dice.getrandbits(32),
            )
        )
        at_s += dice.expovariate(1 / MEAN_PAUSE_S)
    return faults
