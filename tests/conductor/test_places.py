"""Places in a queue on paper: one behind the other, and between each other when they take less than was thought."""

from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from conductor.places import Places


def test_places_follow_each_other() -> None:
    places = Places()
    taken = [places.take(0.0, 0.25, 100.0) for _ in range(8)]
    assert taken == [100.25, 100.5, 100.75, 101.0, 101.25, 101.5, 101.75, 102.0]


def test_a_place_that_is_longer_than_a_second_keeps_those_behind_it_free() -> None:
    places = Places()
    assert [places.take(0.0, 2.5, 100.0) for _ in range(3)] == [102.5, 105.5, 108.5]


def test_when_places_turn_out_shorter_the_next_are_between_those_that_are_taken() -> None:
    places = Places()
    for _ in range(40):
        last = places.take(0.0, 0.25, 100.0)
    assert last == 110.0
    assert places.take(0.0, 0.0625, 101.0) == 101.3125, "behind the four of this second"
    between = [places.take(0.0, 0.0625, 101.0) for _ in range(11 + 8 * 12)]
    assert max(between) == 110.0
    assert places.take(0.0, 0.0625, 101.0) > 110.0


def test_who_may_not_come_before_an_instant_leaves_what_is_before_it_to_others() -> None:
    places = Places()
    assert places.take(107.3, 0.25, 100.0) == 107.3
    assert places.take(0.0, 0.25, 100.0) == 100.25


def test_a_place_that_is_longer_than_a_second_does_not_end_with_the_second_it_began_in() -> None:
    places = Places()
    assert [places.take(0.0, 2.5, now) for now in (100.0, 101.0, 102.0)] == [102.5, 105.5, 108.5]
    assert places.take(0.0, 0.5, 103.0) == 104.0, "they were shorter than was thought"


@example(3.0, [(0.0, 0.0)] * 3 + [(1.0, 0.0), (1.0, 0.0), (2.0, 0.0)])
@given(
    st.floats(0.001, 3.0),
    st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 8.0)), min_size=1, max_size=80),
)
def test_no_second_is_promised_twice(place_s: float, asked: list[tuple[float, float]]) -> None:
    places, now, taken = Places(), 100.0, []
    for gap_s, wait_s in asked:
        now += gap_s
        taken.append(places.take(now + wait_s, place_s, now))
        assert taken[-1] >= now + max(wait_s, min(place_s, 1.0)) - 1e-9
    taken.sort()
    # Any stretch holds what fits, one place that began before it, and those of the seconds at both its ends.
    for (i, first), (j, last) in itertools.combinations(enumerate(taken), 2):
        assert (j - i) * place_s <= last - first + 2 * place_s + 2.0 + 1e-9
