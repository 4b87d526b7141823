"""Two tiers: a disk that is full, lost, or found again at a restart."""

from __future__ import annotations

import pytest

from kvstore.disk.base import Pin
from kvstore.promises import Outcome
from kvstore.stored import Tier, Watermarks
from tests.kvstore.tiered import Tiered, chain, key, keys


def test_a_full_disk_drops_its_coldest_leaf() -> None:
    node = Tiered.make(memory=4, disk=3)
    node.put(chain(1, 2))
    node.sink(1, 2)
    node.put(chain(3))
    node.sink(3)
    node.use(2, 1)  # block 3 is the coldest now, block 1 comes next but has a follower
    for number in (4, 5):
        node.put(chain(number))
        node.copy(number)
        node.use(1)
    assert node.on_disk_only() == [1]
    assert node.in_memory() == [4, 5]


def test_a_disk_full_of_copies_of_what_is_in_memory_does_not_block_demotion() -> None:
    marks = Watermarks(evict_above=0.8, evict_share=0.1)
    node = Tiered.make(memory=10, disk=4, watermarks=marks)
    for number in range(1, 5):
        node.put(chain(number))
    node.copy(1, 2, 3, 4)
    for number in range(5, 10):
        node.put(chain(number))
    node.use(1, 2, 3, 4)
    stores = node.demotions()
    assert [store.object.key for store in stores] == [key(5), key(6)]
    node.written(stores)
    assert node.in_memory() == [1, 2, 3, 4, 7, 8, 9]
    assert node.on_disk_only() == [5, 6]
    assert node.state.counters["copies_dropped"] == 2
    assert node.state.catalog.usage().disk_live_bytes == node.state.catalog.usage().disk_limit_bytes


def test_a_copy_is_not_dropped_for_another_copy_nor_from_under_a_reader() -> None:
    node = Tiered.make(memory=4, disk=1)
    for number in (1, 2):
        node.put(chain(number))
    node.copy(1)
    found = node.state.catalog.find(key(2))
    assert found is not None
    assert node.state.moves.copies(2**30, [found]) == []
    node.lease(1)
    assert not node.state.catalog.drop_a_copy()
    assert node.tiers().keys() == {1, 2}


def test_soft_pinned_objects_are_demoted_and_evicted_last_and_hard_pinned_ones_never() -> None:
    node = Tiered.make(memory=3, watermarks=Watermarks(evict_above=0.0, evict_share=0.0))
    node.put(chain(1, pin=Pin.HARD))
    node.put(chain(2, pin=Pin.SOFT))
    node.put(chain(3))
    stores = node.demotions()
    assert [store.object.key for store in stores] == keys(3, 2)
    node.written(stores)
    assert node.tiers() == {1: Tier.MEMORY, 2: Tier.DISK, 3: Tier.DISK}


@pytest.mark.parametrize("restarted", [False, True])
def test_pins_hold_on_disk_too(restarted: bool) -> None:
    node = Tiered.make(memory=8, disk=3)
    for number, pin in ((1, Pin.HARD), (2, Pin.SOFT), (3, Pin.NONE)):
        if restarted:
            node.recover(number, 5, pin=pin)
        else:
            node.put(chain(number, pin=pin))
            node.sink(number)
    for number, left in ((4, [1, 2]), (5, [1]), (6, [1])):
        node.put(chain(number))
        node.copy(number)
        assert node.on_disk_only() == left
    assert node.in_memory() == [4, 5, 6]


def test_of_generations_found_at_a_restart_the_latest_counts_and_new_ones_are_later() -> None:
    node = Tiered.make(disk=3)
    assert node.recover(1, 5)
    assert not node.recover(1, 4)
    assert node.recover(1, 600)
    assert node.recover(2, 9)
    assert node.kept() == keys(1, 2)
    node.put(chain(3))
    found = [node.state.catalog.find(key(number)) for number in (1, 3)]
    assert [stored and stored.generation > 600 for stored in found] == [False, True]


def test_what_is_found_while_its_key_is_being_written_is_not_wanted() -> None:
    node = Tiered.make()
    node.state.writers.reserve("r", chain(1), 30.0, 0.0)
    assert not node.recover(1, 500)
    assert node.tiers() == {}


def test_a_chain_found_from_its_end_is_whole_again() -> None:
    node = Tiered.make(disk=3)
    for number in (3, 2, 1):
        assert node.recover(number, number, parent=number - 1 or None)
    node.put(chain(9))
    node.copy(9)
    assert node.on_disk_only() == [1, 2], "its end was the only one that could go"


@pytest.mark.parametrize("written_meanwhile", [False, True])
def test_an_object_being_checked_stays_where_it_is(written_meanwhile: bool) -> None:
    marks = Watermarks(evict_above=0.0 if written_meanwhile else 1.0, evict_share=0.0)
    node = Tiered.make(memory=1, watermarks=marks)
    node.put(chain(1))
    stores = node.demotions()
    found = node.state.catalog.find(key(1))
    assert found is not None
    node.state.moves.check(found)
    node.written(stores)
    node.copy(1)
    assert node.put(chain(2)) == [Outcome.FULL]
    node.state.moves.checked(found)
    assert node.put(chain(2)) == [Outcome.GRANTED]
    assert node.tiers() == {1: Tier.DISK, 2: Tier.MEMORY}
