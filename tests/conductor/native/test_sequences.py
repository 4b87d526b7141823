"""Sums over sequences and decode steps made in C are those of the twin in numpy, but for what exponentials round."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.native.sequences import (
    NUM_SUMS,
    Decodes,
    NativeSequences,
    PythonSequences,
    Question,
    SequenceLibrary,
    Sequences,
)
from protocol.native import shared_cache
from tests.compilers import need_compiler

INSTANTS = np.array((0.0, 0.5, 1.0, 4.0, 128.0))
NUM_SLOTS, NUM_INSTANCES = 6, 3
seconds = st.floats(0.0, 200.0)


@pytest.fixture(scope="module")
def library() -> SequenceLibrary:
    need_compiler()
    return SequenceLibrary(shared_cache())


def column(draw: st.DrawFn, values: st.SearchStrategy[float], size: int) -> npt.NDArray[np.float64]:
    return np.array(draw(st.lists(values, min_size=size, max_size=size)))


@st.composite
def sequences(draw: st.DrawFn) -> Sequences:
    owner = draw(
        st.lists(st.integers(0, NUM_INSTANCES - 1), min_size=NUM_SLOTS, max_size=NUM_SLOTS)
    )
    begins_at = column(draw, seconds, NUM_SLOTS)
    most = column(draw, st.floats(1.0, 1e6), NUM_SLOTS)
    return Sequences(
        owner=np.array(owner, np.int64),
        tokens=column(draw, st.floats(1.0, 1e6), NUM_SLOTS),
        most=most,
        begins_at=begins_at,
        as_of=begins_at + column(draw, seconds, NUM_SLOTS),
        generated=most * column(draw, st.floats(0.0, 1.0), NUM_SLOTS),
        step_s=column(draw, st.floats(1e-6, 10.0), NUM_SLOTS),
        end_rate=column(draw, st.floats(0.0, 1e3), NUM_SLOTS),
        shapes=np.zeros((NUM_SLOTS, NUM_SUMS, len(INSTANTS))),
        sums=np.zeros((NUM_INSTANCES, NUM_SUMS, len(INSTANTS))),
        instants=INSTANTS + draw(seconds),
    )


def pair(library: SequenceLibrary, columns: Sequences) -> Sequence[tuple[object, Sequences]]:
    """Both kernels, bound to columns of their own."""
    bound = []
    for kernel in (NativeSequences(library), PythonSequences()):
        own = Sequences(*(c.copy() for c in columns))
        kernel.bind(own)
        bound.append((kernel, own))
    return bound


def assert_alike(first: Sequences, second: Sequences) -> None:
    for one, other in ((first.shapes, second.shapes), (first.sums, second.sums)):
        scale = max(float(np.abs(other).max()), 1.0)
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12 * scale)


@given(columns=sequences(), again=st.sets(st.integers(0, NUM_SLOTS - 1)), later=seconds)
def test_what_is_added_and_drawn_again_is_alike(
    library: SequenceLibrary, columns: Sequences, again: set[int], later: float
) -> None:
    (native, ours), (twin, theirs) = pair(library, columns)
    for slot in range(NUM_SLOTS):
        native.add(slot)
        twin.add(slot)
    assert_alike(ours, theirs)
    some = np.array(sorted(again), np.int64)
    for kernel, own in ((native, ours), (twin, theirs)):
        own.end_rate[some] /= 2.0
        kernel.redraw(some)
    assert_alike(ours, theirs)
    for kernel, own in ((native, ours), (twin, theirs)):
        own.instants[:] += later
        kernel.draw(np.arange(NUM_SLOTS))
    assert_alike(ours, theirs)


@st.composite
def questions(draw: st.DrawFn) -> Question:
    looks = st.tuples(*[st.integers(1, len(INSTANTS) - 1)] * 3)
    return Question(
        draw(looks),
        draw(st.tuples(*[st.floats(0.0, 1.0)] * 3)),
        draw(st.tuples(*[st.floats(1.0, 1e6)] * 3)),
        draw(st.floats(0.0, 100.0)),
        draw(st.floats(0.0, 1e5)),
        draw(st.integers(0, 10**6)),
        draw(st.integers(1, 512)),
    )


@given(data=st.data(), columns=sequences(), question=questions())
def test_decode_steps_are_alike(
    library: SequenceLibrary, data: st.DataObject, columns: Sequences, question: Question
) -> None:
    size = data.draw(st.integers(0, 5))
    numbers = data.draw(st.lists(st.integers(0, NUM_INSTANCES - 1), min_size=size, max_size=size))
    free = data.draw(st.lists(st.integers(-100, 2**32), min_size=size, max_size=size))
    decodes = Decodes(
        number=np.array(numbers, np.int64),
        slots=column(data.draw, st.sampled_from([1.0, 64.0, math.inf]), size),
        c0=column(data.draw, st.floats(0.0, 1.0), size),
        c1=column(data.draw, st.floats(0.0, 1.0), size),
        c2=column(data.draw, st.floats(0.0, 1e-3), size),
        other_seqs=column(data.draw, st.floats(-10.0, 1e3), size),
        other_tokens=column(data.draw, st.floats(-1e4, 1e7), size),
        free_blocks=np.array(free, np.int64),
    )
    (native, ours), (twin, theirs) = pair(library, columns)
    for kernel, own in ((native, ours), (twin, theirs)):
        kernel.draw(np.arange(NUM_SLOTS))
        theirs.sums[:] = ours.sums  # the same to the bit, so that a limit is met by both or by none
        assert own.sums.any()
    found, expected = native.weigh(decodes, question), twin.weigh(decodes, question)
    for name, one, other in zip(found._fields, found, expected, strict=True):
        assert one.shape == other.shape == (size,)
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-9, err_msg=name)
