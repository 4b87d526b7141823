"""Sums over sequences at coming instants, and decode steps with a newcomer: compiled, or in numpy without a compiler.

What the columns mean is said in `conductor.outlook` and `conductor.columns`; a kernel is bound to those of one outlook
and keeps nothing else. The compiled one and its twin agree but for the last bits, since exponentials do.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from typing import NamedTuple

import numpy as np

from conductor.columns import Flags, Floats, Ints
from conductor.native.base import NUMBER, POINTER, address_of, library, pointers

RUNNING, CONTEXT, HELD = range(3)
NUM_SUMS = 3
_QUESTION = struct.Struct("13d")  # `Question` of sequences.c


class Sequences(NamedTuple):
    """By slot, but for the last two."""

    owner: Ints  # number of the instance
    tokens: Floats
    most: Floats
    begins_at: Floats
    as_of: Floats
    generated: Floats
    step_s: Floats
    end_rate: Floats
    shapes: Floats  # [slots, NUM_SUMS, instants]: what each adds to the sums
    sums: Floats  # [numbers, NUM_SUMS, instants]
    instants: Floats


class Decodes(NamedTuple):
    """Columns of the table of decode instances."""

    number: Ints
    slots: Floats
    c0: Floats
    c1: Floats
    c2: Floats
    other_seqs: Floats
    other_tokens: Floats
    free_blocks: Ints


class Question(NamedTuple):
    """Three looks at all instances with a newcomer: now, when it lands, in the middle of its answer."""

    after: tuple[int, int, int]  # of each look, the instant at or after it, not the first one
    weight: tuple[float, float, float]  # and how near to it: 0 = at the one before
    own_tokens: tuple[float, float, float]  # the newcomer's
    num_overtaking: float  # sequences more, but for now
    expected_output: float
    needed_blocks: int
    block_size: int


class Steps(NamedTuple):
    """Shapes [instances]."""

    num_seqs: Floats  # now
    context_tokens: Floats
    landing_seqs: Floats
    landing_tokens: Floats
    spare_blocks: Floats
    tbt_s: Floats
    landing_tbt_s: Floats
    later_tbt_s: Floats
    has_slot: Flags


class SequenceKernel:
    """In numpy. Slots and numbers are within the columns it is bound to, which are contiguous."""

    def __init__(self) -> None:
        self._columns: Sequences

    def bind(self, columns: Sequences) -> None:
        """From now on these. Again whenever one of them is replaced."""
        self._columns = columns

    def add(self, slot: int) -> None:
        """Draws what a new sequence adds, and adds it."""
        columns = self._columns
        shape = _shapes(columns, np.array([slot]))[0]
        columns.shapes[slot] = shape
        columns.sums[columns.owner[slot]] += shape

    def redraw(self, slots: Ints) -> None:
        """Draws some again; the sums follow. No slot is named twice."""
        columns = self._columns
        shapes = _shapes(columns, slots)
        np.add.at(columns.sums, columns.owner[slots], shapes - columns.shapes[slots])
        columns.shapes[slots] = shapes

    def draw(self, slots: Ints) -> None:
        """All sums from these, which are all there are."""
        columns = self._columns
        columns.shapes[slots] = _shapes(columns, slots)
        columns.sums[:] = 0.0
        np.add.at(columns.sums, columns.owner[slots], columns.shapes[slots])

    def weigh(self, decodes: Decodes, question: Question) -> Steps:
        after, weight = np.array(question.after), np.array(question.weight)
        sums = self._columns.sums[decodes.number]
        running, context, held = np.maximum(
            sums[:, :, after - 1] * (1.0 - weight) + sums[:, :, after] * weight, 0.0
        ).transpose(1, 2, 0)
        num_seqs = np.maximum(running + decodes.other_seqs, 0.0) + 1.0
        tokens = np.maximum(context + decodes.other_tokens, 0.0)
        tokens += np.array(question.own_tokens)[:, None]
        more = np.array((0.0, question.num_overtaking, question.num_overtaking))[:, None]
        tokens *= 1.0 + more / num_seqs  # of the mean length of those that are there
        num_seqs = num_seqs + more
        beside = np.minimum(num_seqs, decodes.slots)
        step_s = decodes.c0 + decodes.c1 * beside + decodes.c2 * (tokens * beside / num_seqs)
        # Blocks left for others at the worst of these moments, with the newcomer's whole answer.
        grown = np.maximum(held[1], held[2]) - held[0] + question.expected_output
        spare = decodes.free_blocks - question.needed_blocks - grown / question.block_size
        loads = (num_seqs[0], tokens[0], num_seqs[1], tokens[1], spare)
        return Steps(*loads, step_s[0], step_s[1], step_s[2], num_seqs[1] <= decodes.slots)


class NativeSequences(SequenceKernel):
    """In sequences.c."""

    def __init__(self, compiled: ctypes.PyDLL) -> None:
        self._add, self._draw = compiled.sequences_add, compiled.sequences_draw
        self._weigh = compiled.sequences_weigh
        self._add.argtypes = POINTER, NUMBER, NUMBER
        self._draw.argtypes = POINTER, POINTER, NUMBER, NUMBER, ctypes.c_int32
        self._weigh.argtypes = POINTER, NUMBER, POINTER, NUMBER, POINTER, POINTER, POINTER
        self._add.restype = self._draw.restype = self._weigh.restype = None
        self._columns: Sequences  # whose addresses are known
        self._known = _Sequences()
        self._at = ctypes.addressof(self._known)
        self._num_instants = 0
        self._question = ctypes.create_string_buffer(_QUESTION.size)
        self._decodes: Decodes | None = None  # the last ones, whose addresses are known
        self._known_decodes = _Decodes()

    def bind(self, columns: Sequences) -> None:
        self._columns = columns
        self._num_instants = len(columns.instants)
        for name, column in zip(Sequences._fields, columns, strict=True):
            setattr(self._known, name, address_of(column))

    def add(self, slot: int) -> None:
        self._add(self._at, slot, self._num_instants)

    def redraw(self, slots: Ints) -> None:
        self._draw(self._at, address_of(slots), len(slots), self._num_instants, 0)

    def draw(self, slots: Ints) -> None:
        self._columns.sums[:] = 0.0
        self._draw(self._at, address_of(slots), len(slots), self._num_instants, 1)

    def weigh(self, decodes: Decodes, question: Question) -> Steps:
        after, weight, own_tokens, *rest = question
        _QUESTION.pack_into(self._question, 0, *after, *weight, *own_tokens, *rest)
        num_rows = len(decodes.number)
        found = np.empty((8, num_rows))
        has_slot = np.empty(num_rows, np.bool_)
        self._weigh(
            *(self._at, self._num_instants, ctypes.byref(self._know(decodes)), num_rows),
            *(self._question, address_of(found), address_of(has_slot)),
        )
        now, context, landing, tokens, spare, tbt_s, landing_s, later_s = found
        return Steps(now, context, landing, tokens, spare, tbt_s, landing_s, later_s, has_slot)

    def _know(self, decodes: Decodes) -> ctypes.Structure:
        last = self._decodes
        if last is None or not all(map(operator.is_, decodes, last)):
            self._decodes = decodes
            self._known_decodes = _Decodes(*map(address_of, decodes))
        return self._known_decodes


_Sequences = pointers("_Sequences", Sequences._fields)
_Decodes = pointers("_Decodes", Decodes._fields)


def _shapes(columns: Sequences, slots: Ints) -> Floats:
    """What sequences add to the sums at each instant; shape [slots, NUM_SUMS, instants]."""
    instants = columns.instants
    as_of, step_s = columns.as_of[slots, None], columns.step_s[slots, None]
    generated = columns.generated[slots, None]
    passed_s = np.maximum(instants - as_of, 0.0)
    left_s = (columns.most[slots, None] - generated) * step_s
    # It is there now, whenever it was looked at: only what comes after now may end it.
    at_risk_s = np.minimum(passed_s, instants - instants[0])
    likely = np.exp(at_risk_s * -columns.end_rate[slots, None]) * (passed_s < left_s)
    held = (passed_s / step_s + (columns.tokens[slots, None] + generated)) * likely
    running = likely * (instants >= columns.begins_at[slots, None])
    shapes = np.stack((running, held * (running > 0.0), held), axis=1)
    mean_s = 1.0 / (columns.end_rate[slots, None] + 1.0 / np.maximum(left_s, step_s))
    _count_short(columns, slots, mean_s[:, 0], shapes)
    return shapes


def _count_short(columns: Sequences, slots: Ints, mean_s: Floats, shapes: Floats) -> None:
    """Sequences that begin after an instant and are over before the next one would be seen at neither. They count at
    both by the share of the time between them that they run. Changes `shapes`."""
    instants, as_of = columns.instants, columns.as_of[slots]
    after = np.searchsorted(instants, as_of, "right")
    within = (after > 0) & (after < len(instants)) & (instants[after - 1] < as_of)
    rows = np.flatnonzero(within)
    share = mean_s[rows] / (instants[after[rows]] - instants[after[rows] - 1])
    rows, share = rows[share < 1.0], share[share < 1.0]
    mean = columns.tokens[slots[rows]] + columns.generated[slots[rows]]
    held = share * (mean + mean_s[rows] / columns.step_s[slots[rows]] / 2.0)
    last = after[rows]
    shapes[rows] *= np.arange(len(instants)) < last[:, None, None]
    for at in (last - 1, last):
        shapes[rows, RUNNING, at], shapes[rows, CONTEXT, at] = share, held
    shapes[rows, HELD, last] = held


def sequence_kernel() -> SequenceKernel:
    """A new one, not bound yet."""
    compiled = library("sequences")
    return SequenceKernel() if compiled is None else NativeSequences(compiled)
