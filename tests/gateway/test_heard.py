"""A gateway knows when events of a worker were lost between two streams."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from gateway.cluster.heard import Heard
from protocol.pb import worker_pb2


def standing(times_given_up: int, num_batches: int) -> worker_pb2.Standing:
    return worker_pb2.Standing(times_given_up=times_given_up, num_batches=num_batches)


@given(
    streams=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=1, max_size=10
    )
)
def test_a_stream_begins_well_exactly_where_nothing_was_missed(
    streams: list[tuple[int, int, bool]],
) -> None:
    """Each stream brings some batches, loses some, and may be followed by the worker giving this gateway up."""
    heard, given_up, taken, is_whole = Heard(), 0, 0, True
    for num_brought, num_lost, gives_up in streams:
        assert heard.begins(standing(given_up, taken)) == is_whole
        for _ in range(num_brought):
            heard.came()
        taken += num_brought + num_lost
        is_whole = not num_lost
        if gives_up:
            given_up, taken, is_whole = given_up + 1, 0, False
    assert heard.begins(standing(given_up, taken)) == is_whole


def test_who_was_given_up_before_its_first_stream_has_missed_something() -> None:
    assert not Heard().begins(standing(1, 0))


def test_what_was_sent_into_a_connection_that_was_gone_is_missed() -> None:
    assert not Heard().begins(standing(0, 1))
