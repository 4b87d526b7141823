"""Figures of all live instances as numpy arrays: one table per role, one row per instance.

The tables are a cache: queues, decode loads and members write to them on every change (`RowRef`), so that a placement
is a fixed number of numpy operations. Rule: rows are in order of registration, without holes, and arrays are replaced,
never resized, when an instance joins or leaves. Does not know what the figures mean.

Instances are known to policies by digests of their names, from which `uniform` draws stateless random numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Generic, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from moonserve.protocol.kv_blocks import WORD_MASK, mix64
from moonserve.protocol.kv_blocks import digest64 as digest64  # users' policies import it from here

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
    """Columns that every role has; all have equal length."""

    ids: Names = field(default_factory=_NAMES)
    is_open: Flags = field(default_factory=_FLAGS)  # accepts new work: not draining
    chosen_at: Ints = field(default_factory=_INTS)  # number of the placement that last chose it; 0 = none yet
    host: Words = field(default_factory=_WORDS)  # digest of the host's name
    num_blocks: Ints = field(default_factory=_INTS)  # of a worker's pool
    bit: Ints = field(default_factory=_INTS)  # number in the directory
    link: Ints = field(default_factory=_INTS)  # number in `Transfers`

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Ints) -> Self:
        """Returns a copy of the given rows."""
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
        """Removes a row; later rows move up by one."""
        for name in self._names():
            setattr(self, name, np.delete(getattr(self, name), row))

    def _names(self) -> list[str]:
        return [column.name for column in fields(self)]

    def validate(self) -> None:
        assert {len(getattr(self, name)) for name in self._names()} == {len(self)}


@dataclass(slots=True, eq=False)
class PrefillTable(Table):
    """Figures of prefill instances, from `PrefillQueue` and registrations."""

    identity: Words = field(default_factory=_WORDS)  # digest of the instance id, for `uniform`
    home: Ints = field(default_factory=_INTS)  # row of the home store; meaningless unless `has_home`
    has_home: Flags = field(default_factory=_FLAGS)
    local_bytes_per_s: Floats = field(default_factory=_FLOATS)
    c0: Floats = field(default_factory=_FLOATS)  # corrected prefill profile
    c1: Floats = field(default_factory=_FLOATS)
    c2: Floats = field(default_factory=_FLOATS)
    waiting_s: Floats = field(default_factory=_FLOATS)  # predicted total of the waiting prompts
    running_s: Floats = field(default_factory=_FLOATS)  # predicted total of the running prompt
    began_at: Floats = field(default_factory=_FLOATS)  # assumed begin of the running prompt
    surplus_s: Floats = field(default_factory=_FLOATS)  # work that other conductors placed

    def estimate_s(self, now: float) -> Floats:
        """Returns the seconds until all queued work has run; `PrefillQueue.estimate_s` of every row."""
        left_s = np.maximum(self.running_s - np.maximum(now - self.began_at, 0.0), 0.0)
        waiting: Floats = left_s + self.waiting_s + self.surplus_s
        return waiting


@dataclass(slots=True, eq=False)
class DecodeTable(Table):
    """Figures of decode instances, from `DecodeBook` and registrations."""

    slots: Floats = field(default_factory=_FLOATS)  # most sequences in a step; infinite = unlimited
    c0: Floats = field(default_factory=_FLOATS)  # corrected decode profile
    c1: Floats = field(default_factory=_FLOATS)
    c2: Floats = field(default_factory=_FLOATS)
    number: Ints = field(default_factory=_INTS)  # in `Outlook`
    other_seqs: Floats = field(default_factory=_FLOATS)  # running sequences in addition to those of `Outlook`
    other_tokens: Floats = field(default_factory=_FLOATS)  # tokens of their contexts
    free_blocks: Ints = field(default_factory=_INTS)  # blocks not needed by placed prompts
    reads_prompts: Flags = field(default_factory=_FLAGS)  # can prefill its own prompts
    step_tokens: Floats = field(default_factory=_FLOATS)  # most tokens in a step; infinite = not reported
    reading_s: Floats = field(default_factory=_FLOATS)  # predicted total of prompts placed to be prefilled here
    p0: Floats = field(default_factory=_FLOATS)  # corrected prefill profile
    p1: Floats = field(default_factory=_FLOATS)
    p2: Floats = field(default_factory=_FLOATS)

    def step_s(self, num_seqs: Floats | Ints, context_tokens: Floats | Ints) -> Floats:
        """Returns the duration of a step; `DecodeProfile.batch_step_s` of every row."""
        running = np.minimum(num_seqs, self.slots)
        held = context_tokens * running / num_seqs
        seconds: Floats = self.c0 + self.c1 * running + self.c2 * held
        return seconds


@dataclass(slots=True, eq=False)
class StoreTable(Table):
    """Figures of store nodes, from registrations and placements."""

    pending_reads: Ints = field(default_factory=_INTS)  # blocks that placed prompts have yet to read


T = TypeVar("T", bound=Table)


@dataclass(slots=True, eq=False)
class RowRef(Generic[T]):
    """Location of one instance's figures: a row of its role's table, or of a private table once it has left."""

    table: T
    row: int

    @classmethod
    def in_private_table(cls, table: type[T]) -> "RowRef[T]":
        """Returns a row of a private table that is never read."""
        own = table()
        return cls(own, own.append())

    def detach(self) -> None:
        """Moves to a private table before the row is deleted, so that late changes do not reach its successor."""
        self.table = self.table.take(np.array([self.row]))
        self.row = 0


# Random numbers that depend on an instance's digest and a key alone, so that equal histories give equal decisions.
# Highest-random-weight hashing (Thaler and Ravishankar, 1998) over them gives consistent choices: an instance that
# joins or leaves moves only the keys that it wins or had.

_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's
_MANTISSA_SHIFT = np.uint64(11)


def uniform(identities: Words, key: int) -> Floats:
    """Returns a number in [0, 1) for each identity, which looks independent of the numbers for other keys."""
    mixed = mix64(identities ^ np.uint64(key * _GAMMA & WORD_MASK))
    return (mixed >> _MANTISSA_SHIFT).astype(np.float64) * 2.0**-53
