"""The log's state: nothing is given out twice, every page is accounted for, and compaction chooses well."""

from __future__ import annotations

import random

from kvstore.disk.base import PAGE, Place
from kvstore.disk.format import segment_of
from kvstore.disk.log import Log, Segment

SEGMENT_PAGES = 64
NUM_SEGMENTS = 12
RECORD = 90
"""Bytes, about."""


def a_log() -> Log:
    return Log(NUM_SEGMENTS * SEGMENT_PAGES * PAGE, SEGMENT_PAGES * PAGE)


class Store:
    """Writes one object after the other and compacts at once, as the tier does in the background."""

    def __init__(self) -> None:
        self.log = a_log()
        self.live: list[tuple[Place, int]] = []
        self.number = 0

    def put(self, num_pages: int) -> bool:
        while not self._append(num_pages, urgent=False):
            if self._roll(urgent=False):
                continue
            victim = self.log.victim()
            if victim is None:
                return False
            self._compact(victim)
        return True

    def _append(self, num_pages: int, *, urgent: bool) -> bool:
        active = self.log.active
        if active is None or not self.log.may_append(urgent=urgent):
            return False
        if not active.fits(num_pages, RECORD, 0):
            return False
        active.promise(RECORD, 0)
        self.live.append((self.log.append(num_pages, live=True), num_pages))
        active.keep_record(bytes(RECORD))
        return True

    def _roll(self, *, urgent: bool) -> bool:
        if not self.log.may_open(urgent=urgent):
            return False
        if self.log.active is not None:
            self.log.seal().forget_footer()
        self.number += 1
        self.log.open(self.number)
        return True

    def _compact(self, victim: Segment) -> None:
        self.log.compacting(victim)
        moving = [each for each in self.live if segment_of(each[0]) == victim.number]
        for place, num_pages in moving:
            if not self._append(num_pages, urgent=True):
                assert self._roll(urgent=True)
                assert self._append(num_pages, urgent=True)
            self.live.remove((place, num_pages))
            assert self.log.release(place)
        self.log.retire(victim)
        self.log.validate()

    def release(self, index: int) -> None:
        place, _ = self.live.pop(index)
        assert self.log.release(place)
        assert not self.log.release(place)


def test_below_the_live_limit_there_is_always_room() -> None:
    rng = random.Random(4)
    store = Store()
    for _ in range(6_000):
        num_pages = rng.choice((1, 2, 3))
        while store.log.usage().live + num_pages * PAGE > store.log.live_limit:
            store.release(rng.randrange(len(store.live)))
        assert store.put(num_pages)
    store.log.validate()
    assert store.log.usage().capacity == NUM_SEGMENTS * SEGMENT_PAGES * PAGE


def test_a_full_log_refuses_and_compaction_comes_to_an_end() -> None:
    store = Store()
    while store.put(5):
        pass
    for _ in range(3):
        assert not store.put(5)
    store.release(0)
    store.log.validate()


def test_places_are_never_given_twice() -> None:
    rng = random.Random(5)
    store = Store()
    seen: set[Place] = set()
    for _ in range(3_000):
        if len(store.live) > 100:
            store.release(rng.randrange(len(store.live)))
        before = {place for place, _ in store.live}
        assert store.put(2)
        new = {place for place, _ in store.live} - before
        assert not new & seen
        seen |= new


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
