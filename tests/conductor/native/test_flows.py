"""Flows moved and weighed in C are those of the twin in numpy, which is the plain text of what is meant."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.native.flows import (
    FLOW_COLUMNS,
    LEFT,
    Links,
    NativeFlows,
    PythonFlows,
)
from protocol.native import shared_cache
from tests.compilers import need_compiler

NUM_ENDPOINTS = 6
rates = st.floats(1e3, 1e10)
sizes = st.floats(0.0, 1e9)


@pytest.fixture(scope="module")
def native() -> NativeFlows:
    need_compiler()
    return NativeFlows(shared_cache())


@st.composite
def links(draw: st.DrawFn) -> Links:
    hosts = draw(st.lists(st.integers(0, 3), min_size=NUM_ENDPOINTS, max_size=NUM_ENDPOINTS))
    some = st.lists(rates, min_size=2 * NUM_ENDPOINTS, max_size=2 * NUM_ENDPOINTS)
    return Links(np.array(hosts, np.int64), np.array(draw(some)), np.array(draw(some)))


@st.composite
def flows(draw: st.DrawFn, known: Links) -> npt.NDArray[np.float64]:
    """Some of them without bytes left."""
    rows = []
    for _ in range(draw(st.integers(0, 12))):
        source, target = draw(
            st.tuples(*[st.integers(0, NUM_ENDPOINTS - 1)] * 2).filter(lambda e: e[0] != e[1])
        )
        local = int(known.hosts[source] == known.hosts[target])
        nbytes, share = draw(sizes), draw(st.sampled_from([0.0, 0.5, 1.0]))
        ends = (source, target, 2 * source + local, 2 * target + local)
        rows.append((*ends, nbytes, nbytes * share, draw(rates), 0.0))
    return np.array(rows).reshape(-1, FLOW_COLUMNS)


@given(data=st.data(), seconds=st.floats(0.0, 10.0))
def test_time_passes_alike(native: NativeFlows, data: st.DataObject, seconds: float) -> None:
    """To the bit: every operation is the same one in the same order."""
    known = data.draw(links())
    rows = data.draw(flows(known))
    twin = rows.copy()
    native.advance(rows, known, seconds)
    PythonFlows().advance(twin, known, seconds)
    assert rows.tolist() == twin.tolist()
    assert (rows[:, LEFT] >= 0.0).all()


@given(data=st.data(), source=st.integers(0, NUM_ENDPOINTS - 1))
def test_new_flows_take_equally_long(native: NativeFlows, data: st.DataObject, source: int) -> None:
    known = data.draw(links())
    rows = data.draw(flows(known))
    targets = np.array(
        data.draw(st.permutations(range(NUM_ENDPOINTS)))[: data.draw(st.integers(0, 6))]
    )
    targets = targets.astype(np.int64)
    nbytes = np.array([data.draw(sizes) for _ in targets])
    measured = None
    if data.draw(st.booleans()):
        measured = np.array([data.draw(rates | st.just(math.nan)) for _ in range(NUM_ENDPOINTS)])
    found = native.seconds(rows, known, source, targets, nbytes, measured)
    expected = PythonFlows().seconds(rows, known, source, targets, nbytes, measured)
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-12)


def test_a_table_that_grows_finds_room_to_work_in(native: NativeFlows) -> None:
    """One kernel serves every book of a process, of any size, in any order."""
    for size in (2, 3_000, 5):
        hosts = np.arange(size, dtype=np.int64)
        known = Links(hosts, np.full(2 * size, 100.0), np.full(2 * size, 100.0))
        rows = np.array([(0, i, 0, 2 * i, 50.0, 50.0, 100.0, 0.0) for i in range(1, size)])
        native.advance(rows, known, 1e9)
        assert not rows[:, LEFT].any()
        found = native.seconds(rows, known, 0, hosts[1:], np.full(size - 1, 200.0), None)
        assert found.tolist() == [2.0] * (size - 1)


def test_columns_that_c_could_not_read_are_refused(native: NativeFlows) -> None:
    known = Links(np.zeros(2, np.int64), np.ones(4), np.ones(4))
    rows = np.zeros((FLOW_COLUMNS, 4)).T
    with pytest.raises((TypeError, ValueError)):
        native.advance(rows, known, 1.0)
