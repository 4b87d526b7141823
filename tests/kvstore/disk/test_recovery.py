"""Which of several records of one object counts."""

from __future__ import annotations

from kvstore.disk.base import DiskObject
from kvstore.disk.format import Record
from kvstore.disk.recovery import Known
from tests.kvstore.disk.tiers import written


def record(about: DiskObject, source: int = 0) -> Record:
    return Record(about, page=1, source=source)


def test_a_copy_of_a_copy_rules_out_what_stayed_where_it_was_first() -> None:
    """Segment 3 could not be emptied; its object went on to 7, and from there to 9, before 7 was given up."""
    about = written(1).object
    known = Known()
    found = [known.counts(record(about, source)) for source in (7, 0)]  # in 9, in 3
    assert found == [True, False]


def test_of_three_records_of_one_object_the_latest_counts() -> None:
    about = written(1).object
    known = Known()
    assert [known.counts(record(about, source)) for source in (7, 3, 0)] == [True, False, False]


def test_another_generation_is_another_object() -> None:
    known = Known()
    assert known.counts(record(written(1, generation=2).object, source=3))
    assert known.counts(record(written(1, generation=1).object))
