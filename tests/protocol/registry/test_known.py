"""Whom a process believes in: differences, and no departures that are only the registry's trouble."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from protocol.registry.base import Member
from protocol.registry.known import Differences, KnownMembers
from protocol.registry.table import with_epoch
from tests.protocol.registry.conftest import ids, member

A, B = member("a"), member("b")


def test_an_answer_is_told_as_differences() -> None:
    known = KnownMembers(linger_s=0)
    assert known.update([B, A], now=0) == Differences(joined=(A, B))
    later = with_epoch(A, 7)
    assert known.update([later], now=1) == Differences(left=(B,), changed=(later,))
    assert known.update([later], now=2) == Differences()
    assert dict(known.members) == {"a": later}
    fuller = dataclasses.replace(later, facts={"free": "1"})
    assert known.update([fuller], now=3).changed == (fuller,)


def test_a_registry_that_restarted_empty_takes_nobody_away() -> None:
    known = KnownMembers(linger_s=6)
    known.update([A, B], now=0)
    assert known.update([], now=10) == Differences()
    assert set(known.members) == {"a", "b"}
    again = with_epoch(A, 9)
    assert known.update([again], now=12) == Differences(changed=(again,))
    assert known.due_at == 16
    assert known.expire(now=15.9) == Differences()
    assert known.expire(now=16) == Differences(left=(B,))
    assert known.due_at is None


def test_who_comes_back_in_time_was_never_away() -> None:
    known = KnownMembers(linger_s=6)
    known.update([A], now=0)
    known.update([], now=1)
    assert known.update([A], now=6.9) == Differences()
    assert known.due_at is None


@given(st.lists(st.tuples(st.sets(st.sampled_from("abcd")), st.floats(0, 5)), max_size=30), st.sampled_from([0.0, 6.0]))
def test_differences_add_up_to_the_members(answers: list[tuple[set[str], float]], linger_s: float) -> None:
    known, view, now = KnownMembers(linger_s=linger_s), dict[str, Member](), 0.0
    for names, seconds in answers:
        now += seconds
        joined, left, changed = known.update([member(name) for name in names], now)
        assert not changed
        assert not set(ids(list(joined))) & view.keys()
        view |= {new.instance_id: new for new in joined}
        for gone in left:
            del view[gone.instance_id]
        known.validate()
        assert view == dict(known.members)
        assert names <= view.keys()
