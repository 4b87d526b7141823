"""Two tiers: what is demoted when, what comes back, and that no chain is broken in either."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.allocator import ALIGNMENT
from kvstore.disk.base import Pin, Place
from kvstore.promises import Outcome
from kvstore.stored import Tier, Watermarks
from protocol.errors import StaleLease
from tests.kvstore.tiered import Tiered, chain, key, keys

MARKS = Watermarks()


def full(units: int = 100) -> Tiered:
    """Memory for `units` objects at its high watermark, filled with objects 1, 2, … that follow nobody."""
    node = Tiered.make(units, 2 * units, watermarks=MARKS)
    for number in range(1, units * 9 // 10 + 1):
        node.put(chain(number))
    return node


def test_below_the_high_watermark_nothing_is_demoted() -> None:
    assert full().demotions() == []


def test_above_the_high_watermark_the_coldest_are_demoted_down_to_the_low_one() -> None:
    node = full()
    node.put(chain(91))
    stores = node.demotions()
    assert [store.object.key for store in stores] == keys(1, 2, 3, 4, 5, 6)
    assert len(node.in_memory()) == 91, "they can be read in memory while they are being written"
    node.written(stores)
    assert node.on_disk_only() == [1, 2, 3, 4, 5, 6]
    assert node.state.usage().free == 15 * ALIGNMENT


def test_once_below_the_low_watermark_demotion_rests_until_the_high_one() -> None:
    node = full()
    node.put(chain(91))
    node.written(node.demotions())
    for number in range(92, 97):
        node.put(chain(number))
        assert node.demotions() == []
    node.put(chain(97))
    assert len(node.demotions()) == 6


def test_demotion_goes_on_to_the_low_watermark_when_it_is_asked_for_little_at_a_time() -> None:
    node = full()
    node.put(chain(91))
    num_stores = 0
    while stores := node.state.moves.demotions(ALIGNMENT):
        assert len(stores) == 1
        num_stores += 1
        node.written(stores)
    assert num_stores == 6


def test_what_has_a_copy_on_disk_leaves_memory_without_being_written() -> None:
    node = full()
    node.copy(1, 2, 3, 4, 5, 6)
    node.put(chain(91))
    assert node.demotions() == []
    assert node.on_disk_only() == [1, 2, 3, 4, 5, 6]


def test_a_demoted_object_is_read_after_it_was_brought_to_memory() -> None:
    node = Tiered.make()
    node.put(chain(1, 2))
    node.sink(1, 2)
    lease_id, loads = node.lease(1, 2)
    assert [load.object.key for load in loads] == keys(1, 2)
    assert node.state.usage().reserved == 2 * ALIGNMENT
    for load in loads:
        node.state.loaded(load, True)
    lease = node.state.readers.settle(lease_id)
    assert [stored.offset for stored in lease.objects] == [load.offset for load in loads]
    assert [stored.checksum for stored in lease.objects] == [1, 2]
    assert node.in_memory() == [1, 2]


def test_an_object_leased_while_it_is_written_stays_in_memory() -> None:
    node = full()
    node.put(chain(91))
    stores = node.demotions()
    lease_id, _ = node.lease(1)
    node.state.readers.release(lease_id, 0.0)
    node.use(2)
    node.written(stores)
    assert node.on_disk_only() == [3, 4, 5, 6]
    assert len(node.disk.places) == 6


def test_an_object_reported_as_read_while_it_is_written_stays_in_memory() -> None:
    node = full()
    node.put(chain(91))
    stores = node.demotions()
    node.state.remove([key(2)], corrupt=False)
    node.put(chain(99))  # it has the record of what was removed
    node.use(1, 99, 500)
    node.written(stores)
    assert node.on_disk_only() == [3, 4, 5, 6]
    assert {1, 99} <= set(node.in_memory())
    assert node.state.usage().num_objects == 91


@given(
    reports=st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=6),
    sunk=st.sets(st.integers(0, 7)),
)
def test_what_a_report_names_counts_as_used_one_after_the_other_from_its_end(
    reports: list[list[int]], sunk: set[int]
) -> None:
    """Whatever the tenants and the tiers."""
    at_once, one_by_one = (_two_tenants(sunk) for _ in range(2))
    for numbers in reports:
        at_once.use(*numbers)
        for number in reversed(numbers):
            one_by_one.use(number)
    assert at_once.state.counters == one_by_one.state.counters
    assert _gone_by_turn(at_once) == _gone_by_turn(one_by_one)


def _two_tenants(sunk: set[int]) -> Tiered:
    """Objects 0 to 7, by turns of a tenant with a quota and of two without; some only on disk."""
    node = Tiered.make(8, 8, quotas={"own": 4})
    for number in range(8):
        node.put(chain(number, tenant=("own", "", "other", "own")[number % 4]))
    for number in sunk:
        node.sink(number)
    return node


def _gone_by_turn(node: Tiered) -> list[dict[int, Tier]]:
    """What is where, while others take the place of all of them."""
    seen = []
    for number in range(100, 116):
        node.put(chain(number, tenant="own" if number % 2 else ""))
        seen.append(node.tiers())
    return seen


def test_an_object_asked_for_by_a_writer_while_it_is_written_stays_in_memory() -> None:
    node = full()
    node.put(chain(91))
    stores = node.demotions()
    assert node.put(chain(1)) == [Outcome.PRESENT]
    node.written(stores)
    assert node.on_disk_only() == [2, 3, 4, 5, 6]


def test_memory_that_will_not_be_free_after_all_is_demoted_elsewhere() -> None:
    node = full()
    node.put(chain(91))
    stores = node.demotions()
    node.use(1, 2, 3, 4, 5, 6)
    assert node.state.moves.leaving_bytes == 0
    assert [store.object.key for store in node.demotions()] == keys(7, 8, 9, 10, 11, 12)
    node.written(stores)
    assert len(node.in_memory()) == 91


def test_a_block_whose_follower_came_while_it_was_written_stays_in_memory() -> None:
    node = Tiered.make(4, watermarks=Watermarks(evict_above=0.0, evict_share=0.0))
    node.put(chain(1))
    stores = node.demotions()
    node.state.writers.reserve("r", chain(1, 2)[1:], 10.0, 0.0)
    node.written(stores)
    assert node.in_memory() == [1]


def test_a_failed_write_leaves_the_object_in_memory_and_the_disk_room_free() -> None:
    node = Tiered.make(4, 1, watermarks=Watermarks(evict_above=0.0, evict_share=0.0))
    node.put(chain(1))
    [store] = node.demotions()
    node.state.moves.stored(store, None)
    assert node.in_memory() == [1]
    assert len(node.demotions()) == 1


def test_an_object_removed_while_it_is_written_releases_its_place() -> None:
    node = full()
    node.put(chain(91))
    stores = node.demotions()
    node.state.remove(keys(1), corrupt=False)
    assert node.state.usage().leased == 6 * ALIGNMENT, "its bytes stay until they are written"
    node.written(stores)
    assert sorted(node.disk.places.values()) == keys(2, 3, 4, 5, 6)
    assert node.on_disk_only() == [2, 3, 4, 5, 6]


def test_an_object_removed_while_it_is_read_is_a_miss_and_frees_its_memory() -> None:
    node = Tiered.make()
    node.put(chain(1))
    node.sink(1)
    lease_id, [load] = node.lease(1)
    node.state.remove(keys(1), corrupt=False)
    node.state.loaded(load, True)
    assert node.state.readers.settle(lease_id).objects == ()
    assert node.state.usage().free == 4 * ALIGNMENT
    assert node.disk.places == {}


def test_what_cannot_be_read_is_lost_and_the_lease_keeps_what_comes_before() -> None:
    node = Tiered.make()
    node.put(chain(1, 2, 3))
    node.sink(1, 2, 3)
    lease_id, loads = node.lease(1, 2, 3)
    for load, good in zip(loads, (True, False, True), strict=True):
        node.state.loaded(load, good)
    assert [stored.key for stored in node.state.readers.settle(lease_id).objects] == keys(1)
    assert node.in_memory() == [1, 3]
    assert node.state.counters["disk_reads_failed"] == 1


def test_a_lease_that_is_asked_for_twice_reads_the_disk_once() -> None:
    node = Tiered.make()
    node.put(chain(1))
    node.sink(1)
    lease_id, [load] = node.lease(1)
    assert node.state.readers.lease(lease_id, keys(1), 30.0, 0.0).loads == ()
    node.state.loaded(load, True)
    again = node.state.readers.lease(lease_id, keys(1), 30.0, 0.0)
    assert (again.loads, [stored.offset for stored in again.objects]) == ((), [load.offset])


def test_a_lease_on_a_removed_object_never_shows_the_one_that_came_after_it() -> None:
    node = Tiered.make()
    node.put(chain(1))
    node.sink(1)
    _, [load] = node.lease(1)
    waiting, _ = node.lease(1)
    node.state.remove(keys(1), corrupt=False)
    node.put(chain(1))
    node.state.loaded(load, True)
    assert node.state.readers.settle(waiting).objects == ()
    assert node.in_memory() == [1]


def test_two_leases_on_one_object_share_its_read() -> None:
    node = Tiered.make()
    node.put(chain(1))
    node.sink(1)
    first, [load] = node.lease(1)
    second, loads = node.lease(1)
    assert loads == ()
    node.state.loaded(load, True)
    assert [o.offset for o in node.state.readers.settle(second).objects] == [load.offset]
    node.state.readers.release(second, 0.0)
    assert node.state.usage().leased == ALIGNMENT
    assert [o.offset for o in node.state.readers.settle(first).objects] == [load.offset]


def test_a_lease_that_ended_while_its_objects_were_read_is_refused() -> None:
    node = Tiered.make()
    node.put(chain(1))
    node.sink(1)
    lease_id, [load] = node.lease(1)
    node.state.expire(100.0)
    node.state.loaded(load, True)
    with pytest.raises(StaleLease):
        node.state.readers.settle(lease_id)
    assert node.in_memory() == [1]


def test_a_lease_is_cut_where_memory_ends() -> None:
    node = Tiered.make(memory=3)
    for number in (1, 2, 3):
        node.put(chain(number))
        node.sink(number)
    node.put(chain(9))
    node.lease(9)
    _, loads = node.lease(1, 2, 3)
    assert [load.object.key for load in loads] == keys(1, 2)
    node.state.validate()


def test_prefetch_loads_the_leading_run_as_far_as_there_is_room() -> None:
    node = Tiered.make(memory=2)
    for number in (1, 2, 3):
        node.put(chain(number))
        node.sink(number)
    loads = node.state.readers.prefetch(keys(1, 2, 3))
    assert [load.object.key for load in loads] == keys(1, 2)
    assert node.state.readers.prefetch(keys(1, 2)) == [], "they are on their way"
    for load in loads:
        node.state.loaded(load, True)
    assert node.in_memory() == [1, 2]


def test_a_chain_is_demoted_from_its_end_without_waiting_for_each_write() -> None:
    node = Tiered.make(4, watermarks=Watermarks(evict_above=0.5, evict_share=0.25))
    node.put(chain(1, 2, 3))
    node.use(3)
    stores = node.demotions()
    assert [store.object.key for store in stores] == keys(3, 2)
    node.written(reversed(stores))
    assert node.tiers() == {1: Tier.MEMORY, 2: Tier.DISK, 3: Tier.DISK}


def test_a_block_whose_follower_could_not_be_written_may_have_left_before_it() -> None:
    node = Tiered.make(4, watermarks=Watermarks(evict_above=0.0, evict_share=0.0))
    node.put(chain(1, 2))
    leaf, head = node.demotions()
    node.written([head])
    node.state.moves.stored(leaf, None)
    assert node.tiers() == {1: Tier.DISK, 2: Tier.MEMORY}


def test_a_block_whose_follower_is_on_disk_is_not_evicted_from_memory() -> None:
    node = Tiered.make(memory=2)
    node.put(chain(1, 2))
    node.sink(2)
    node.put(chain(8))
    assert node.put(chain(9)) == [Outcome.GRANTED]
    assert node.tiers() == {1: Tier.MEMORY, 2: Tier.DISK, 9: Tier.MEMORY}
    node.lease(9)
    assert node.put(chain(10)) == [Outcome.FULL]


def test_a_block_whose_follower_is_on_disk_leaves_memory_once_it_has_a_copy_there() -> None:
    node = Tiered.make(memory=2)
    node.put(chain(1, 2))
    node.sink(1, 2)
    assert node.put(chain(8, 9)) == [Outcome.GRANTED, Outcome.GRANTED]
    assert node.on_disk_only() == [1, 2]


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


def test_a_disk_full_of_what_is_in_use_refuses_and_loses_nothing() -> None:
    node = Tiered.make(memory=4, disk=1)
    node.put(chain(1))
    node.sink(1)
    _, [load] = node.lease(1)
    node.put(chain(2))
    found = node.state.find(key(2))
    assert found is not None
    assert node.state.moves.copies(2**30, [found]) == []
    node.state.loaded(load, True)
    assert node.in_memory() == [1, 2]


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
    assert node.state.usage().disk_live == node.state.usage().disk_limit


def test_a_copy_is_not_dropped_for_another_copy_nor_from_under_a_reader() -> None:
    node = Tiered.make(memory=4, disk=1)
    for number in (1, 2):
        node.put(chain(number))
    node.copy(1)
    found = node.state.find(key(2))
    assert found is not None
    assert node.state.moves.copies(2**30, [found]) == []
    node.lease(1)
    assert not node.state._catalog.drop_a_copy()
    assert node.tiers().keys() == {1, 2}


def test_writes_under_way_count_as_space_on_disk() -> None:
    node = Tiered.make(memory=4, disk=1)
    node.put(chain(1))
    node.put(chain(2))
    both = [stored for n in (1, 2) if (stored := node.state.find(key(n))) is not None]
    [store] = node.state.moves.copies(2**30, both)
    assert not node.recover(3, 50)
    node.written([store])
    assert node.state.usage().disk_live == node.state.usage().disk_limit


def test_soft_pinned_objects_are_demoted_and_evicted_last_and_hard_pinned_ones_never() -> None:
    node = Tiered.make(memory=3, watermarks=Watermarks(evict_above=0.0, evict_share=0.0))
    node.put(chain(1, pin=Pin.HARD))
    node.put(chain(2, pin=Pin.SOFT))
    node.put(chain(3))
    stores = node.demotions()
    assert [store.object.key for store in stores] == keys(3, 2)
    node.written(stores)
    assert node.tiers() == {1: Tier.MEMORY, 2: Tier.DISK, 3: Tier.DISK}


def test_pins_hold_on_disk_too() -> None:
    node = Tiered.make(memory=8, disk=3)
    for number, pin in ((1, Pin.HARD), (2, Pin.SOFT), (3, Pin.NONE)):
        node.put(chain(number, pin=pin))
        node.sink(number)
    for number, left in ((4, [1, 2]), (5, [1]), (6, [1])):
        node.put(chain(number))
        node.copy(number)
        assert node.on_disk_only() == left
    assert node.in_memory() == [4, 5, 6]


def test_losing_the_disk_keeps_what_is_in_memory() -> None:
    node = Tiered.make()
    node.put(chain(1, 2, 3))
    node.sink(2, 3)
    node.copy(1)
    node.state.forget_disk()
    assert node.tiers() == {1: Tier.MEMORY}
    assert node.disk.places == {}
    assert node.state.counters["objects_lost_with_disk"] == 2
    assert node.state.usage().disk_limit == node.state.usage().disk_live == 0


def test_losing_the_disk_ends_moves_under_way_without_loss_of_memory() -> None:
    node = Tiered.make(memory=4, watermarks=Watermarks(evict_above=0.5, evict_share=0.0))
    node.put(chain(1))
    node.sink(1)
    node.put(chain(2))
    node.put(chain(3))
    lease_id, [load] = node.lease(1)
    stores = node.demotions()
    assert stores
    node.state.forget_disk()
    for store in stores:
        node.state.moves.stored(store, Place(7))
    node.state.loaded(load, False)
    assert node.state.readers.settle(lease_id).objects == ()
    assert node.in_memory() == [2, 3]
    assert node.state.usage().free == 2 * ALIGNMENT


def test_what_a_lost_disk_still_finds_is_not_wanted() -> None:
    node = Tiered.make()
    node.state.forget_disk()
    assert not node.recover(1, 5)
    assert node.tiers() == {}


def test_of_generations_found_at_a_restart_the_latest_counts_in_any_order() -> None:
    node = Tiered.make(disk=2)
    assert node.recover(1, 5)
    assert not node.recover(1, 4)
    assert node.recover(1, 6)
    assert node.recover(2, 9)
    found = node.state.find(key(1))
    assert found is not None
    assert found.generation == 6
    assert sorted(node.disk.places.values()) == keys(1, 2)


def test_a_later_generation_takes_the_space_of_the_one_before_on_a_full_disk() -> None:
    node = Tiered.make(disk=1)
    assert node.recover(1, 5)
    assert node.recover(1, 6)
    assert node.on_disk_only() == [1]


def test_generations_go_on_above_those_found_at_a_restart() -> None:
    node = Tiered.make()
    node.recover(1, 500)
    node.put(chain(2))
    found = node.state.find(key(2))
    assert found is not None
    assert found.generation > 500


def test_an_object_written_since_the_restart_outlives_the_one_found_later() -> None:
    node = Tiered.make()
    node.recover(9, 500)
    node.put(chain(1))
    assert not node.recover(1, 400)
    assert node.in_memory() == [1]


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


def test_a_pin_found_at_a_restart_holds() -> None:
    node = Tiered.make(disk=1)
    node.recover(1, 5, pin=Pin.HARD)
    node.put(chain(9))
    node.copy(9)
    assert node.on_disk_only() == [1]


def test_an_object_that_the_disk_moved_is_released_where_it_is() -> None:
    node = Tiered.make()
    node.put(chain(1))
    node.sink(1)
    found = node.state.find(key(1))
    assert found is not None
    assert found.place is not None
    del node.disk.places[found.place]
    elsewhere = node.disk.put(key(1))
    assert node.state.moves.relocated(key(1), found.generation, elsewhere)
    assert not node.state.moves.relocated(key(1), found.generation + 1, Place(99))
    node.state.remove(keys(1), corrupt=False)
    assert node.disk.places == {}
    assert not node.state.moves.relocated(key(1), found.generation, elsewhere)


def test_an_object_being_checked_stays_where_it_is() -> None:
    node = Tiered.make(memory=1)
    node.put(chain(1))
    node.copy(1)
    found = node.state.find(key(1))
    assert found is not None
    node.state.moves.check(found)
    assert node.put(chain(2)) == [Outcome.FULL]
    node.state.moves.checked(found)
    assert node.put(chain(2)) == [Outcome.GRANTED]
    assert node.tiers() == {1: Tier.DISK, 2: Tier.MEMORY}


def test_an_object_being_checked_while_it_is_written_stays_in_memory() -> None:
    node = Tiered.make(watermarks=Watermarks(evict_above=0.0, evict_share=0.0))
    node.put(chain(1))
    stores = node.demotions()
    found = node.state.find(key(1))
    assert found is not None
    node.state.moves.check(found)
    node.written(stores)
    assert node.in_memory() == [1]
    node.state.moves.checked(found)
    assert node.demotions() == []
    assert node.on_disk_only() == [1]
