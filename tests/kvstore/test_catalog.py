"""The catalog's own rules: eviction from the end of chains, readers told first, space that is always accounted for."""

from __future__ import annotations

import pytest

from kvstore.native.base import Entry
from kvstore.promises import Outcome
from kvstore.room import MAX_PASSED_OVER
from kvstore.stored import Tier
from protocol.errors import InvalidRequest
from tests.kvstore.tiered import Tiered, chain, key, keys


def test_the_index_changes_before_space_is_given_to_others() -> None:
    """A reader that copied in between finds another entry than before, and discards what it copied."""
    node = Tiered.make(1, None)
    node.put(chain(1))
    catalog = node.state.catalog
    asked: list[Entry | None] = []
    allocate = catalog.space.allocate

    def watched(nbytes: int) -> int | None:
        found = catalog.find(key(1))
        offset = allocate(nbytes)
        asked.append(None if found is None or offset is None else Entry(0, 1, 0, 0, offset))
        return offset

    catalog.space.allocate = watched  # type: ignore[method-assign]
    node.put(chain(2))
    assert asked == [None, None], "whenever space was given, its old object was no longer found"


def test_a_block_written_again_is_followed_by_the_blocks_that_stayed() -> None:
    node = Tiered.make(memory=3, disk=0)
    node.put(chain(1, 2, 3))
    node.state.remove(keys(2), corrupt=False)
    node.put(chain(1, 2))
    node.use(3)
    for number, left in ((7, [1, 2, 7]), (8, [1, 7, 8]), (9, [7, 8, 9])):
        node.put(chain(number))
        assert node.in_memory() == left


def test_a_parent_is_not_evicted_for_a_block_that_is_being_written() -> None:
    node = Tiered.make(memory=2, disk=0)
    node.put(chain(1))
    node.state.writers.reserve("r", chain(1, 2)[1:], 30.0, 0.0)
    assert node.put(chain(3)) == [Outcome.FULL]
    assert node.in_memory() == [1]


def test_an_object_that_would_follow_itself_is_refused() -> None:
    node = Tiered.make()
    [wish] = chain(1)
    wishes = [type(wish)(key=wish.key, parent=wish.key, length=1)]
    with pytest.raises(InvalidRequest, match="own parent"):
        node.state.writers.reserve("r", wishes, 30.0, 0.0)
    assert node.tiers() == {}


def test_looking_for_a_victim_is_bounded_and_forgets_nobody() -> None:
    units = MAX_PASSED_OVER + 8
    node = Tiered.make(memory=units, disk=2 * units)
    heads = range(1, units)
    for number in heads:
        node.put(chain(number, 1000 + number))
        node.sink(1000 + number)
    node.put(chain(9))
    leaf = 5000
    node.put(chain(leaf))
    assert node.put(chain(leaf + 1)) == [Outcome.FULL], "too many before it cannot go yet"
    node.copy(1)
    assert node.put(chain(leaf + 1)) == [Outcome.GRANTED]
    assert node.tiers()[1] is Tier.DISK


def test_metadata_of_an_object_is_small() -> None:
    node = Tiered.make(memory=20_000, disk=0)
    for start in range(1, 20_000, 1_000):
        node.put(chain(*range(start, start + 1_000)))
    assert node.state.catalog.metadata_bytes / len(node.state.catalog) < 200
