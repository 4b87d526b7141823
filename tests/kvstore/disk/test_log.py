"""The log's state: nothing is given out twice, every page is accounted for, and compaction chooses well."""

from __future__ import annotations

from kvstore.disk.base import PAGE
from kvstore.disk.log import Log, Segment

SEGMENT_PAGES = 64
NUM_SEGMENTS = 12


def a_log() -> Log:
    return Log(NUM_SEGMENTS * SEGMENT_PAGES * PAGE, SEGMENT_PAGES * PAGE)


def test_the_emptier_and_the_older_of_two_segments_goes_first() -> None:
    log = a_log()
    for number, dead in ((1, 10), (2, 30), (3, 30)):
        segment = Segment(number, SEGMENT_PAGES)
        segment.add(1, 60 - dead, live=True)
        segment.add(61 - dead, dead, live=False)
        segment.footer = 2
        log.adopt(segment)
    victim = log.victim()
    assert victim is not None
    assert victim.number == 2


def test_a_tombstone_is_needed_as_long_as_a_segment_may_hold_what_it_forbids() -> None:
    log = a_log()
    for number in (3, 5, 8):
        log.adopt(Segment(number, SEGMENT_PAGES))
    assert log.still_forbids(5, without=8)
    assert log.still_forbids(3, without=5)
    assert not log.still_forbids(3, without=3)
    assert not log.still_forbids(0, without=8)


def test_an_object_costs_a_few_bytes_of_memory() -> None:
    segment = Segment(1, 2**20)
    for number in range(50_000):
        segment.add(1 + 17 * number, 17, live=True)
    assert segment.nbytes / 50_000 < 6


def test_the_end_of_a_segment_counts_as_gain_only_if_its_objects_could_have_filled_it() -> None:
    segment = Segment(1, SEGMENT_PAGES, footer=2)
    segment.add(1, 40, live=True)
    assert segment.gain == 0
    segment = Segment(1, SEGMENT_PAGES, footer=2)
    segment.add(1, 4, live=True)
    assert segment.gain == segment.room
