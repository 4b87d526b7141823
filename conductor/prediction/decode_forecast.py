"""Predicted load of decode instances at a few future instants, as sums over the sequences placed there.

Owns a row for every placed sequence that has not ended. A sequence holds its prompt's tokens from placement, runs and
grows by one token per step from its begin, and ends at a constant rate, at the latest at its token limit. The rate is
estimated again with every heartbeat, from how long other sequences of that length continued. A sequence that both
begins and ends between two instants counts at both by the share of the time that it runs. The sums per instance are
kept at INSTANTS after the time of drawing, change with every sequence, and are interpolated linearly. So a placement
reads all instances at once, whatever the number of sequences. `sequences.c` has the arithmetic. Pure; knows no blocks.
"""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from moonserve.conductor.prediction.c_bindings import NUM_SUMS, SEQUENCES, PredictedSteps, SequenceKernel
from moonserve.conductor.prediction.instance_table import DecodeTable, Floats, Ints

# Seconds after drawing. Denser where first tokens are expected; an answer of 1,000 tokens takes about half a minute.
INSTANTS = np.array((0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128))
# Sums are drawn again after this, which is the spacing of the first instants.
_STALE_S = 0.5

_FIRST_CAPACITY = 16
_PACE_WEIGHT = 0.05  # of the newest value
_OFFSETS: list[float] = INSTANTS.tolist()
_COLUMNS = (
    "_is_used", "_owner", "_tokens", "_most", "_begins_at", "_as_of", "_generated", "_step_s", "_end_rate",
)  # fmt: skip


class ExpectedEnds(NamedTuple):
    """Expected ends of the sequences of an instance, soonest first."""

    ends_s: Floats  # from now
    tokens: Ints  # of their prompts


class Progress(NamedTuple):
    """Estimated progress of an instance's running sequences."""

    slots: Ints
    generated: Floats  # tokens
    most: Floats  # tokens that they may generate


class DecodeForecast:
    """Columns of sequences by slot and sums of instances by number; slots and numbers are reused."""

    def __init__(self) -> None:
        self._is_used = np.zeros(_FIRST_CAPACITY, np.bool_)
        self._owner = np.zeros(_FIRST_CAPACITY, np.int64)
        self._tokens = np.zeros(_FIRST_CAPACITY)  # of the prompt
        self._most = np.zeros(_FIRST_CAPACITY)  # tokens it may generate
        self._begins_at = np.zeros(_FIRST_CAPACITY)
        self._as_of = np.zeros(_FIRST_CAPACITY)  # time for which the next three columns hold; not before its begin
        self._generated = np.zeros(_FIRST_CAPACITY)
        self._step_s = np.ones(_FIRST_CAPACITY)
        self._end_rate = np.zeros(_FIRST_CAPACITY)  # per second
        self._shapes = np.zeros((_FIRST_CAPACITY, NUM_SUMS, len(INSTANTS)))
        self._free = list(range(_FIRST_CAPACITY))
        self._sums = np.zeros((1, NUM_SUMS, len(INSTANTS)))  # row 0: instances that have left
        self._free_numbers: list[int] = []
        self._instants = INSTANTS.copy()
        self.pace_s = 0.0  # running mean of predicted times between two tokens of a sequence
        self._kernel = SequenceKernel()
        self._bind()

    def __len__(self) -> int:
        return len(self._is_used) - len(self._free)

    # -- instances

    def add_instance(self) -> int:
        """Adds an instance and returns its number, above 0."""
        if self._free_numbers:
            return self._free_numbers.pop()
        self._sums = np.concatenate([self._sums, np.zeros_like(self._sums[:1])])
        self._bind()
        return len(self._sums) - 1

    def remove_instance(self, number: int) -> None:
        """Removes an instance. Its sequences stay until they are removed, but count for no instance."""
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
        """Adds a sequence that is expected to generate `expected` tokens, at most `most`, one per `step_s`. Returns its
        slot."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._is_used[slot] = True
        self._owner[slot], self._tokens[slot], self._most[slot] = number, tokens, most
        self._begins_at[slot] = self._as_of[slot] = begins_at
        self._generated[slot], self._step_s[slot] = 0.0, step_s
        self._end_rate[slot] = max(1.0 / expected - 1.0 / most, 0.0) / step_s
        self.pace_s += (step_s - self.pace_s) * (_PACE_WEIGHT if self.pace_s else 1.0)
        self._kernel.add(slot)
        return slot

    def begin(self, slot: int, begins_at: float) -> None:
        """Sets the time of the first token, actual or predicted, and shifts the rest of the sequence. The sums change
        only when they are drawn again, which is soon enough for a begin that was expected about then."""
        self._begins_at[slot] = self._as_of[slot] = begins_at
        self._generated[slot] = 0.0

    def remove(self, slot: int) -> None:
        self._sums[self._owner[slot]] -= self._shapes[slot]
        self._is_used[slot] = False
        self._free.append(slot)

    def running(self, number: int, now: float) -> Progress:
        """Returns the progress of an instance's sequences that should have begun."""
        begun = self._is_used & (self._owner == number) & (self._as_of < now)
        slots = np.flatnonzero(begun)
        generated = self._generated[slots] + (now - self._as_of[slots]) / self._step_s[slots]
        most = self._most[slots]
        return Progress(slots, np.minimum(generated, most), most)

    def update_remaining(self, progress: Progress, remaining: Floats, step_s: float, now: float) -> None:
        """Predicts that these sequences continue for `remaining` tokens in the mean (at least 1), one per `step_s`."""
        slots, generated, most = progress
        left = np.maximum(most - generated, 1.0)
        self._as_of[slots], self._step_s[slots] = now, step_s
        self._generated[slots] = most - left
        rate = 1.0 / np.clip(remaining, 1.0, left) - 1.0 / left
        self._end_rate[slots] = np.maximum(rate, 0.0) / step_s
        self._kernel.redraw(slots)

    # -- queries

    def advance(self, now: float) -> None:
        """Draws all sums again if the instants are stale."""
        if not 0.0 <= now - self._instants[0] <= _STALE_S:
            np.add(INSTANTS, now, out=self._instants)
            self._kernel.draw(np.flatnonzero(self._is_used))

    def predict_steps(
        self,
        decodes: DecodeTable,
        *,
        instants: tuple[float, float, float],
        own_tokens: tuple[float, float, float],
        num_overtaking: float,
        expected_output: float,
        needed_blocks: int,
        block_size: int,
    ) -> PredictedSteps:
        """Predicts decode steps of these instances with a new sequence, at three instants: now, when it lands, and in
        the middle of its answer. `own_tokens`: its context then; `num_overtaking`: extra sequences at the last two."""
        drawn_at = float(self._instants[0])
        after, weight = zip(*(_between(instant - drawn_at) for instant in instants), strict=True)
        others = (num_overtaking, expected_output, needed_blocks, block_size)
        return self._kernel.weigh(decodes, (*after, *weight, *own_tokens, *others))

    def expected_ends(self, number: int, now: float) -> ExpectedEnds:
        """Returns the expected ends of an instance's sequences. Overdue sequences end with the next step."""
        slots = np.flatnonzero(self._is_used & (self._owner == number))
        step_s = self._step_s[slots]
        left_s = (self._most[slots] - self._generated[slots]) * step_s
        # Mean remaining time under a constant end rate and a limit; the inverse of the rate formula in `add`.
        mean_s = 1.0 / (self._end_rate[slots] + 1.0 / np.maximum(left_s, step_s))
        ends_s = np.maximum(self._as_of[slots] + mean_s - now, step_s)
        tokens = self._tokens[slots].astype(np.int64)
        order = np.lexsort((tokens, ends_s))
        return ExpectedEnds(ends_s[order], tokens[order])

    # -- storage

    def _bind(self) -> None:
        """Passes the columns to the kernel, which works on them in place."""
        self._kernel.bind([getattr(self, f"_{name}") for name in SEQUENCES])

    def _grow(self) -> None:
        capacity = len(self._is_used)
        self._free.extend(range(capacity, 2 * capacity))
        for name in _COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.ones_like(column)]))
        self._is_used[capacity:] = False
        self._shapes = np.concatenate([self._shapes, np.zeros_like(self._shapes)])
        self._bind()

    def validate(self) -> None:
        used = np.flatnonzero(self._is_used)
        assert sorted([*used.tolist(), *self._free]) == list(range(len(self._is_used))), "lost slot"
        sums = np.zeros_like(self._sums)
        np.add.at(sums, self._owner[used], self._shapes[used])
        assert np.allclose(self._sums, sums, rtol=1e-6, atol=1e-3), "stale sums"
        assert not self._sums[self._free_numbers].any()
        assert (self._as_of[used] >= self._begins_at[used]).all()
        assert (self._generated[used] <= self._most[used]).all()
        assert (self._end_rate[used] >= 0.0).all()


def _between(offset: float) -> tuple[int, float]:
    """Returns the index (at least 1) of the instant after `offset` seconds, and its interpolation weight, 0 to 1."""
    after = min(max(bisect_right(_OFFSETS, offset), 1), len(_OFFSETS) - 1)
    first, last = _OFFSETS[after - 1], _OFFSETS[after]
    return after, min(max((offset - first) / (last - first), 0.0), 1.0)
