"""Whether what a node had before it was away may be seen again, by what the others know. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a node that told all its removals: for how long back it knows all there were."""

    settled: bool  # False: it was away itself, and asks as well
    covered_s: float


def covered_s(answers: Sequence[Answer | None]) -> float:
    """How far back all removals are known once these nodes were heard."""
    return max((a.covered_s for a in answers if a is not None and a.settled), default=0.0)


def may_stay(absent_s: float, answers: Sequence[Answer | None]) -> bool | None:
    """One answer for each other node, None where it did not give one; None = ask again.

    It may when one of them knows all of the absence, or when nobody was there: no other node, or only such as were
    away too. It may not when all who are there know less: nothing wrong goes before nothing lost.
    """
    settled = any(answer is not None and answer.settled for answer in answers)
    if settled and covered_s(answers) >= absent_s:
        return True
    return None if None in answers else not settled
