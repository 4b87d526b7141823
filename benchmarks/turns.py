"""Contestants take turns at every load, round by round, so that a busy neighbour disturbs some of each."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

S = TypeVar("S")
L = TypeVar("L")


def in_turns(seats: Sequence[S], loads: Sequence[L], rounds: int, *, first: int = 0) -> Iterator[tuple[S, L]]:
    """Each seat at each load, once in every round; nobody always comes after the same one. `first`: rounds that were
    measured before."""
    for number in range(first, rounds):
        begin = time.monotonic()
        shift = number % len(seats)
        for load in loads:
            for seat in (*seats[shift:], *seats[:shift]):
                yield seat, load
        tell(f"round {number + 1} of {rounds}: {time.monotonic() - begin:.0f} s")


def tell(text: str) -> None:
    print(f"· {text}", file=sys.stderr, flush=True)
