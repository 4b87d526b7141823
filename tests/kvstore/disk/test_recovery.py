"""Which of several records of one object counts."""

from __future__ import annotations

import pytest

from kvstore.disk.base import DiskObject
from kvstore.disk.format import Record, Tombstone, pack_tombstones
from kvstore.disk.recovery import Known
from tests.kvstore.disk.tiers import written


def record(about: DiskObject, source: int = 0) -> Record:
    return Record(about, page=1, source=source)


@pytest.mark.parametrize("records", [((7, 9), (3, 7), (0, 3)), ((7, 9), (0, 3))])
def test_of_several_records_of_one_object_the_latest_counts(records: tuple[tuple[int, int], ...]) -> None:
    """Also where segment 3 could not be emptied, and 7, from which it was copied on, was given up."""
    about = written(1).object
    known = Known()
    found = [known.counts(record(about, source), segment) for source, segment in records]
    assert found == [True] + [False] * (len(records) - 1)


def test_another_generation_is_another_object() -> None:
    known = Known()
    known.forget(pack_tombstones([Tombstone(written(1).object.key, 1, segment=9)]))
    assert known.counts(record(written(1, generation=3).object, source=3), 9)
    assert known.counts(record(written(1, generation=2).object), 3)
    assert not known.counts(record(written(1, generation=1).object), 3)


def test_what_was_forgotten_in_a_segment_may_have_been_written_again_to_a_later_one() -> None:
    about, known = written(1, generation=4).object, Known()
    known.forget(pack_tombstones([Tombstone(about.key, 4, segment=7)]))
    assert not known.counts(record(about), 7)
    assert known.counts(record(about), 8)
    assert known.counts(record(about, source=8), 9)
    assert not known.uncovered


def test_a_copy_of_what_was_forgotten_meanwhile_stays_forgotten() -> None:
    """It lies behind the tombstone, which goes with its source."""
    about, known = written(1, generation=4).object, Known()
    known.forget(pack_tombstones([Tombstone(about.key, 4, segment=7)]))
    assert not known.counts(record(about, source=3), 8)
    assert known.uncovered == [Tombstone(about.key, 4, segment=8)]
