"""What a placement reads of all live instances, as arrays: one table per role, one row per instance.

It owns no truth: books and members write through when they change (`Seat`), so that a placement is a fixed number of
numpy operations. Rule: rows are in order of registration, without holes, and arrays are replaced, never resized, when
an instance joins or leaves. Does not know what the figures mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Generic, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Words: TypeAlias = npt.NDArray[np.uint64]
Names: TypeAlias = npt.NDArray[np.object_]


def _empty(kind: type[np.generic]) -> Callable[[], Any]:
    return partial(np.zeros, 0, kind)


_NAMES: Callable[[], Names] = _empty(np.object_)
_FLAGS: Callable[[], Flags] = _empty(np.bool_)
_INTS: Callable[[], Ints] = _empty(np.int64)
_WORDS: Callable[[], Words] = _empty(np.uint64)
_FLOATS: Callable[[], Floats] = _empty(np.float64)


@dataclass(slots=True, eq=False)
class Table:
    """Columns of equal length that every role has."""

    ids: Names = field(default_factory=_NAMES)
    is_open: Flags = field(default_factory=_FLAGS)  # takes new work: not draining
    chosen_at: Ints = field(default_factory=_INTS)  # number of the placement that last chose it; 0 = none yet
    host: Words = field(default_factory=_WORDS)  # digest of its name
    num_blocks: Ints = field(default_factory=_INTS)  # of a worker's pool
    bit: Ints = field(default_factory=_INTS)  # its number in the directory
    link: Ints = field(default_factory=_INTS)  # in the book of transfers

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Ints) -> Self:
        """A copy of some rows."""
        return type(self)(*(getattr(self, name)[rows] for name in self._names()))

    def append(self) -> int:
        """Adds a row of zeros and returns its number."""
        for name in self._names():
            column = getattr(self, name)
            longer = np.zeros(len(column) + 1, column.dtype)
            longer[:-1] = column
            setattr(self, name, longer)
        return len(self) - 1

    def delete(self, row: int) -> None:
        """The rows behind it move up."""
        for name in self._names():
            setattr(self, name, np.delete(getattr(self, name), row))

    def _names(self) -> list[str]:
        return [column.name for column in fields(self)]

    def validate(self) -> None:
        assert {len(getattr(self, name)) for name in self._names()} == {len(self)}


@dataclass(slots=True, eq=False)
class PrefillTable(Table):
    """Of `PrefillQueue` and of prefill registrations."""

    identity: Words = field(default_factory=_WORDS)  # digest of its id, for draws
    home: Ints = field(default_factory=_INTS)  # row of its home store; meaningless without one
    has_home: Flags = field(default_factory=_FLAGS)
    local_bytes_per_s: Floats = field(default_factory=_FLOATS)
    c0: Floats = field(default_factory=_FLOATS)  # of its profile, corrected
    c1: Floats = field(default_factory=_FLOATS)
    c2: Floats = field(default_factory=_FLOATS)
    waiting_s: Floats = field(default_factory=_FLOATS)  # predicted, of placed prompts but the first
    running_s: Floats = field(default_factory=_FLOATS)  # of the first
    began_at: Floats = field(default_factory=_FLOATS)  # the first, as far as known
    surplus_s: Floats = field(default_factory=_FLOATS)

    def estimate_s(self, now: float) -> Floats:
        """Seconds until all that is there has run; `PrefillQueue.estimate_s` of every row."""
        left_s = np.maximum(self.running_s - np.maximum(now - self.began_at, 0.0), 0.0)
        waiting: Floats = left_s + self.waiting_s + self.surplus_s
        return waiting


@dataclass(slots=True, eq=False)
class DecodeTable(Table):
    """Of `DecodeBook` and of decode registrations."""

    slots: Floats = field(default_factory=_FLOATS)  # infinite = unlimited
    c0: Floats = field(default_factory=_FLOATS)  # of its profile, corrected
    c1: Floats = field(default_factory=_FLOATS)
    c2: Floats = field(default_factory=_FLOATS)
    number: Ints = field(default_factory=_INTS)  # in the outlook
    num_seqs: Ints = field(default_factory=_INTS)  # that run or are on their way
    context_tokens: Ints = field(default_factory=_INTS)  # their prompts', and what heartbeats say
    other_seqs: Floats = field(default_factory=_FLOATS)  # that run beside those of the outlook
    other_tokens: Floats = field(default_factory=_FLOATS)  # of their contexts
    free_blocks: Ints = field(default_factory=_INTS)  # that no placed prompt is going to need
    reads_prompts: Flags = field(default_factory=_FLAGS)  # can prefill what it decodes
    step_tokens: Floats = field(default_factory=_FLOATS)  # in one step; infinite = not told
    reading_s: Floats = field(default_factory=_FLOATS)  # predicted, of prompts placed to be read here
    p0: Floats = field(default_factory=_FLOATS)  # of its prefill profile
    p1: Floats = field(default_factory=_FLOATS)
    p2: Floats = field(default_factory=_FLOATS)

    def step_s(self, num_seqs: Floats | Ints, context_tokens: Floats | Ints) -> Floats:
        """`DecodeProfile.batch_step_s` of every row."""
        running = np.minimum(num_seqs, self.slots)
        held = context_tokens * running / num_seqs
        seconds: Floats = self.c0 + self.c1 * running + self.c2 * held
        return seconds


@dataclass(slots=True, eq=False)
class StoreTable(Table):
    """Of store registrations and of the reads that placed prompts have yet to make."""

    pending_reads: Ints = field(default_factory=_INTS)  # blocks


T = TypeVar("T", bound=Table)


@dataclass(slots=True, eq=False)
class Seat(Generic[T]):
    """Where one instance's figures stand: a row of its role's table, or of a table of its own once it is gone."""

    table: T
    row: int

    @classmethod
    def alone(cls, table: type[T]) -> Seat[T]:
        """In a table that nobody reads."""
        own = table()
        return cls(own, own.append())

    def leave(self) -> None:
        """The row is about to be deleted; late changes of the book must not reach its successor."""
        self.table = self.table.take(np.array([self.row]))
        self.row = 0
