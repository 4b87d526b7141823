"""What decode instances will be running at a few instants to come: sums over the expected begins and ends of sequences.

Owns a row for every placed sequence that has not ended. A sequence holds its prompt's tokens from its placement on,
runs and grows by a token per step from its begin, and leaves at its expected end. Per instance the sums of that are
kept at INSTANTS after the time of drawing, and change with every sequence; between two instants they are straight
lines. So a placement asks for all instances at once, however many sequences they have. Pure; knows no blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from conductor.columns import Floats, Ints

# Seconds after drawing. Denser where prompts' first tokens lie; an answer of 1,000 tokens takes about half a minute.
INSTANTS = np.array((0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128))
# Drawn again after this: the first instants are the dense ones.
_STALE_S = 0.5

_RUNNING, _CONTEXT, _HELD = range(3)
_NUM_SUMS = 3
_FIRST_CAPACITY = 16


class Sums(NamedTuple):
    """At one instant, a row per instance."""

    running: Floats  # sequences
    context_tokens: Floats  # theirs
    held_tokens: Floats  # also of prompts that have not begun


class Drain(NamedTuple):
    """Expected ends of sequences, soonest first."""

    ends_s: Floats  # from now
    tokens: Ints  # of their prompts


class Outlook:
    """Sequences by slot, instances by number; slots and numbers are used again."""

    def __init__(self) -> None:
        self._is_used = np.zeros(_FIRST_CAPACITY, np.bool_)
        self._owner = np.zeros(_FIRST_CAPACITY, np.int64)
        self._tokens = np.zeros(_FIRST_CAPACITY)
        self._most = np.zeros(_FIRST_CAPACITY, np.int64)  # tokens it may generate
        self._begins_at = np.zeros(_FIRST_CAPACITY)
        self._ends_at = np.zeros(_FIRST_CAPACITY)
        self._step_s = np.ones(_FIRST_CAPACITY)
        self._shapes = np.zeros((_FIRST_CAPACITY, _NUM_SUMS, len(INSTANTS)))
        self._free = list(range(_FIRST_CAPACITY))
        self._sums = np.zeros((1, _NUM_SUMS, len(INSTANTS)))  # row 0: of instances that have left
        self._free_numbers: list[int] = []
        self._instants = INSTANTS

    def __len__(self) -> int:
        return len(self._is_used) - len(self._free)

    # -- instances

    def join(self) -> int:
        """The number of a new instance, above 0."""
        if self._free_numbers:
            return self._free_numbers.pop()
        self._sums = np.concatenate([self._sums, np.zeros_like(self._sums[:1])])
        return len(self._sums) - 1

    def leave(self, number: int) -> None:
        """An instance is gone. Its sequences stay until they are removed, and count nowhere."""
        self._owner[self._owner == number] = 0
        self._sums[0] += self._sums[number]
        self._sums[number] = 0.0
        self._free_numbers.append(number)

    # -- sequences

    def add(
        self,
        number: int,
        *,
        tokens: int,
        most: int,
        begins_at: float,
        step_s: float,
        expected: float,
    ) -> int:
        """Its slot. It is expected to generate `expected` tokens, one per `step_s`, and at `most` so many."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._is_used[slot] = True
        self._owner[slot], self._tokens[slot], self._most[slot] = number, tokens, most
        self._begins_at[slot], self._step_s[slot] = begins_at, step_s
        self._ends_at[slot] = begins_at + expected * step_s
        self._put(slot)
        return slot

    def begin(self, slot: int, begins_at: float) -> None:
        """The first token came, or is expected at another time; the rest moves with it."""
        self._sums[self._owner[slot]] -= self._shapes[slot]
        self._ends_at[slot] += begins_at - self._begins_at[slot]
        self._begins_at[slot] = begins_at
        self._put(slot)

    def remove(self, slot: int) -> None:
        self._sums[self._owner[slot]] -= self._shapes[slot]
        self._is_used[slot] = False
        self._free.append(slot)

    def overdue(self, number: int, now: float) -> tuple[Ints, Ints, Ints]:
        """Of an instance's sequences those that should have ended: slots, tokens generated so far, and at most."""
        late = self._is_used & (self._owner == number) & (self._ends_at <= now)
        slots = np.flatnonzero(late)
        generated = (now - self._begins_at[slots]) / self._step_s[slots]
        return slots, generated.astype(np.int64), self._most[slots]

    def extend(self, slots: Ints, remaining: Floats, now: float) -> None:
        """These go on for so many tokens, and for one at least."""
        self._ends_at[slots] = now + np.maximum(remaining, 1.0) * self._step_s[slots]
        for slot in slots.tolist():
            self._sums[self._owner[slot]] -= self._shapes[slot]
            self._put(slot)

    # -- questions

    def advance(self, now: float) -> None:
        """Draws again when the instants have become old."""
        if not 0.0 <= now - self._instants[0] <= _STALE_S:
            self._draw(now)

    def at(self, instant: float, numbers: Ints) -> Sums:
        """Of these instances; beyond the last instant as there."""
        instants = self._instants
        after = min(
            max(int(np.searchsorted(instants, instant, side="right")), 1), len(instants) - 1
        )
        first, last = instants[after - 1], instants[after]
        weight = min(max((instant - first) / (last - first), 0.0), 1.0)
        sums = self._sums[numbers, :, after - 1] * (1.0 - weight)
        sums += self._sums[numbers, :, after] * weight
        np.maximum(sums, 0.0, out=sums)  # what rounding leaves of sequences that are gone
        return Sums(sums[:, _RUNNING], sums[:, _CONTEXT], sums[:, _HELD])

    def drain(self, number: int, now: float) -> Drain:
        """What is overdue ends with the next step."""
        slots = np.flatnonzero(self._is_used & (self._owner == number))
        ends_s = np.maximum(self._ends_at[slots] - now, self._step_s[slots])
        tokens = self._tokens[slots].astype(np.int64)
        order = np.lexsort((tokens, ends_s))
        return Drain(ends_s[order], tokens[order])

    # -- keeping

    def _put(self, slot: int) -> None:
        shape = self._shapes[slot]
        self._fill(shape, slice(slot, slot + 1))
        self._sums[self._owner[slot]] += shape

    def _fill(self, shapes: Floats, slots: slice | Ints) -> None:
        """What sequences add to the sums at each instant; shapes [..., _NUM_SUMS, instants]."""
        instants = self._instants
        begins_at = self._begins_at[slots, None]
        grown = np.maximum(instants - begins_at, 0.0)
        grown /= self._step_s[slots, None]
        grown += self._tokens[slots, None]
        grown *= instants < self._ends_at[slots, None]
        runs = (instants >= begins_at) & (instants < self._ends_at[slots, None])
        shapes[..., _RUNNING, :] = runs
        shapes[..., _CONTEXT, :] = grown * runs
        shapes[..., _HELD, :] = grown

    def _draw(self, now: float) -> None:
        self._instants = INSTANTS + now
        slots = np.flatnonzero(self._is_used)
        shapes = np.empty((len(slots), _NUM_SUMS, len(INSTANTS)))
        self._fill(shapes, slots)
        self._shapes[slots] = shapes
        self._sums = self._summed(slots)

    def _summed(self, slots: Ints) -> Floats:
        owner = self._owner[slots]
        shapes = self._shapes[slots].reshape(len(slots), _NUM_SUMS * len(INSTANTS))
        columns = [np.bincount(owner, column, len(self._sums)) for column in shapes.T]
        return np.stack(columns, axis=1).astype(float).reshape(self._sums.shape)

    def _grow(self) -> None:
        capacity = len(self._is_used)
        self._free.extend(range(capacity, 2 * capacity))
        for name in ("_is_used", "_owner", "_tokens", "_most", "_begins_at", "_ends_at", "_step_s"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.ones_like(column)]))
        self._is_used[capacity:] = False
        self._shapes = np.concatenate([self._shapes, np.zeros_like(self._shapes)])

    def validate(self) -> None:
        used = np.flatnonzero(self._is_used)
        assert sorted([*used.tolist(), *self._free]) == list(range(len(self._is_used))), "lost slot"
        assert np.allclose(self._sums, self._summed(used), rtol=1e-6, atol=1e-3), "stale sums"
        assert not self._sums[self._free_numbers].any()
        assert (self._ends_at[used] >= self._begins_at[used]).all()
