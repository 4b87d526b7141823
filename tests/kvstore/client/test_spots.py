"""Places in registered memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.client.spots import Spots, portions, rooms_between
from protocol.errors import InvalidRequest
from transfer import Segment, TransferEngine


@pytest.fixture
def segment() -> Iterator[Segment]:
    with TransferEngine(cluster_token="spots") as engine:
        yield engine.allocate(1000)


def test_without_lengths_each_spot_ends_where_the_next_begins() -> None:
    assert rooms_between([500, 0, 100], 1000) == [500, 100, 400]


def test_spots_outside_the_segment_are_refused(segment: Segment) -> None:
    Spots.checked(segment, [0, 900], [900, 100])
    for offsets, rooms in [([0], [1001]), ([-1], [5]), ([990], [11]), ([1000], None), ([0], [1, 2])]:
        with pytest.raises(InvalidRequest):
            Spots.checked(segment, offsets, rooms)


def test_packed_spots_lie_back_to_back(segment: Segment) -> None:
    spots = Spots.packed(segment, [10, 0, 20])
    assert spots.offsets.tolist() == [0, 10, 10]
    segment.buffer[10:30] = bytes(range(20))
    assert bytes(spots.memory(2, 20)) == bytes(range(20))


def test_portions_stay_within_the_limit_but_for_single_large_objects() -> None:
    parts = [(part.start, part.stop) for part in portions([4, 4, 4, 20, 1], limit=10)]
    assert parts == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert not list(portions([], limit=10))
