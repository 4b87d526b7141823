"""Interleaves contestants at every load, round by round, so that a busy neighbour disturbs all of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

S = TypeVar("S")
L = TypeVar("L")


def in_turns(seats: Sequence[S], loads: Sequence[L], rounds: int, *, first: int = 0) -> Iterator[tuple[S, L]]:
    """Yields each seat at each load once per round. The first seat rotates from round to round. `first`: number of
    rounds measured before."""
    for number in range(first, rounds):
        begin = time.monotonic()
        shift = number % len(seats)
        for load in loads:
            for seat in (*seats[shift:], *seats[:shift]):
                yield seat, load
        tell(f"round {number + 1} of {rounds}: {time.monotonic() - begin:.0f} s")


def tell(text: str) -> None:
    print(f"· {text}", file=sys.stderr, flush=True)
