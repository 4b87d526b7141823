"""When the sequences of one decode instance are expected to end, and what they then leave. Pure.

Arrays, since a placement that finds no free blocks asks for the order in which all of them end, for every instance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from conductor.columns import Floats, Ints

_FIRST_CAPACITY = 8


class Drain(NamedTuple):
    """Expected ends of sequences, soonest first."""

    ends_s: Floats  # from now
    tokens: Ints
    blocks: Ints


class Endings:
    """One slot per sequence; slots are used again."""

    def __init__(self) -> None:
        self._begins_at = np.zeros(_FIRST_CAPACITY)
        self._expected_output = np.zeros(_FIRST_CAPACITY, np.int64)  # tokens; 0 = the slot is free
        self._tokens = np.zeros(_FIRST_CAPACITY, np.int64)
        self._blocks = np.zeros(_FIRST_CAPACITY, np.int64)
        self._free = list(range(_FIRST_CAPACITY))

    def __len__(self) -> int:
        return len(self._begins_at) - len(self._free)

    def add(self, begins_at: float, expected_output: int, tokens: int, blocks: int) -> int:
        """Its slot. `expected_output` is at least 1."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._begins_at[slot] = begins_at
        self._expected_output[slot] = max(expected_output, 1)
        self._tokens[slot] = tokens
        self._blocks[slot] = blocks
        return slot

    def begin(self, slot: int, begins_at: float) -> None:
        """The first token came, or is expected at another time."""
        self._begins_at[slot] = begins_at

    def remove(self, slot: int) -> None:
        self._expected_output[slot] = 0
        self._free.append(slot)

    def drain(self, tbt_s: float, now: float) -> Drain:
        """With steps of `tbt_s`. What is overdue ends with the next step."""
        slots = np.flatnonzero(self._expected_output)
        ends_s = self._begins_at[slots] + self._expected_output[slots] * tbt_s - now
        ends_s = np.maximum(ends_s, tbt_s)
        tokens, blocks = self._tokens[slots], self._blocks[slots]
        order = np.lexsort((blocks, tokens, ends_s))
        return Drain(ends_s[order], tokens[order], blocks[order])

    def _grow(self) -> None:
        capacity = len(self._begins_at)
        self._free.extend(range(capacity, 2 * capacity))
        self._begins_at = np.concatenate([self._begins_at, np.zeros(capacity)])
        fresh = np.zeros(capacity, np.int64)
        self._expected_output = np.concatenate([self._expected_output, fresh])
        self._tokens = np.concatenate([self._tokens, fresh])
        self._blocks = np.concatenate([self._blocks, fresh])

    def validate(self) -> None:
        used = np.flatnonzero(self._expected_output).tolist()
        assert sorted(used + self._free) == list(range(len(self._begins_at))), "a slot was lost"
