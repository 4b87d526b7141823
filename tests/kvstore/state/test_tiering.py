"""Two tiers: demotion, promotion, and recovery after a restart, none of which breaks a chain in either tier."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.kvstore.disk.base import Pin
from moonserve.kvstore.state.allocator import ALIGNMENT
from moonserve.kvstore.state.objects import PutOutcome, Tier, Watermarks
from tests.kvstore.state.tiered import Tiered, chain, filled, key, keys


def test_above_the_high_watermark_the_coldest_are_demoted_down_to_the_low_one() -> None:
    node = filled(91)
    stores = node.demotions()
    assert [store.object.key for store in stores] == keys(1, 2, 3, 4, 5, 6)
    assert len(node.in_memory()) == 91, "they can be read in memory while they are being written"
    node.written(stores)
    assert node.on_disk_only() == [1, 2, 3, 4, 5, 6]
    assert node.state.catalog.usage().free_bytes == 15 * ALIGNMENT


def test_demotion_runs_to_the_low_watermark_and_pauses_until_the_high_one() -> None:
    node = filled(91)
    for _ in range(6):
        [store] = node.state.tier_moves.demotions(ALIGNMENT)
        node.written([store])
    for number in range(92, 97):
        assert node.demotions() == []
        node.put(chain(number))
    assert node.demotions() == []
    node.put(chain(97))
    assert len(node.demotions()) == 6


def test_an_object_with_a_disk_copy_leaves_memory_without_a_write() -> None:
    node = filled(90)
    node.copy(1, 2, 3, 4, 5, 6)
    node.put(chain(91))
    assert node.demotions() == []
    assert node.on_disk_only() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("unreadable", "leased"), [((), 3), ((2,), 1)], ids=["all", "one cannot be read"])
def test_a_demoted_object_is_read_after_it_was_brought_to_memory(unreadable: tuple[int, ...], leased: int) -> None:
    """An object that cannot be read ends the leased run."""
    node = Tiered.make()
    node.put(chain(1, 2, 3))
    node.sink(1, 2, 3)
    lease_id, loads = node.lease(1, 2, 3)
    assert [load.object.key for load in loads] == keys(1, 2, 3)
    assert node.state.catalog.usage().reserved_bytes == 3 * ALIGNMENT
    for load in loads:
        node.state.tier_moves.read_ended(load, load.object.checksum not in unreadable)
    found = [(stored.offset, stored.checksum) for stored in node.state.leases.settle(lease_id).objects]
    assert found == [(load.offset, load.object.checksum) for load in loads][:leased]
    assert node.in_memory() == [number for number in (1, 2, 3) if number not in unreadable]
    assert node.state.counters["disk_reads_failed"] == len(unreadable)


def asked_for_by_a_writer(node: Tiered) -> None:
    assert node.put(chain(1)) == [PutOutcome.PRESENT]


@pytest.mark.parametrize("used", [asked_for_by_a_writer, lambda node: node.state.leases.release(node.lease(1)[0], 0.0)])
def test_an_object_that_is_used_while_it_is_written_stays_in_memory(used: Callable[[Tiered], None]) -> None:
    node = filled(91)
    stores = node.demotions()
    used(node)
    node.written(stores)
    assert node.on_disk_only() == [2, 3, 4, 5, 6]
    assert len(node.disk.live) == 6


def test_an_object_reported_as_read_while_it_is_written_stays_in_memory() -> None:
    node = filled(91)
    stores = node.demotions()
    node.state.remove([key(2)], corrupt=False)
    node.put(chain(99))  # reuses the record of the removed object
    node.use(1, 99, 500)
    node.written(stores)
    assert node.on_disk_only() == [3, 4, 5, 6]
    assert {1, 99} <= set(node.in_memory())
    assert node.state.catalog.usage().num_objects == 91


@given(reports=st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=6), sunk=st.sets(st.integers(0, 7)))
def test_a_report_counts_as_uses_from_its_end(reports: list[list[int]], sunk: set[int]) -> None:
    at_once, one_by_one = (_two_tenants(sunk) for _ in range(2))
    for numbers in reports:
        at_once.use(*numbers)
        for number in reversed(numbers):
            one_by_one.use(number)
    assert at_once.state.counters == one_by_one.state.counters
    assert _gone_by_turn(at_once) == _gone_by_turn(one_by_one)


def _two_tenants(sunk: set[int]) -> Tiered:
    """Returns a node with objects 0 to 7 of a tenant with a quota and of two without, `sunk` of them only on disk."""
    node = Tiered.make(8, 8, quotas={"own": 4})
    for number in range(8):
        node.put(chain(number, tenant=("own", "", "other", "own")[number % 4]))
    for number in sunk:
        node.sink(number)
    return node


def _gone_by_turn(node: Tiered) -> list[dict[int, Tier]]:
    """Returns the tiers of all objects after each of 16 puts, which replace all of the node's objects."""
    seen = []
    for number in range(100, 116):
        node.put(chain(number, tenant="own" if number % 2 else ""))
        seen.append(node.tiers())
    return seen


def test_a_block_that_gains_a_child_while_it_is_written_stays_in_memory() -> None:
    node = Tiered.make(4, watermarks=Watermarks(evict_above=0.0, evict_share=0.0))
    node.put(chain(1))
    stores = node.demotions()
    node.state.reservations.reserve("r", chain(1, 2)[1:], 10.0, 0.0)
    node.written(stores)
    assert node.in_memory() == [1]


def test_a_chain_is_demoted_from_its_end_without_waiting_for_each_write() -> None:
    node = Tiered.make(4, watermarks=Watermarks(evict_above=0.5, evict_share=0.25))
    node.put(chain(1, 2, 3))
    node.use(3)
    stores = node.demotions()
    assert [store.object.key for store in stores] == keys(3, 2)
    node.written(reversed(stores))
    assert node.tiers() == {1: Tier.MEMORY, 2: Tier.DISK, 3: Tier.DISK}


def test_a_block_with_a_child_on_disk_is_not_evicted_from_memory() -> None:
    node = Tiered.make(memory=2)
    node.put(chain(1, 2))
    node.sink(2)
    node.put(chain(8))
    assert node.put(chain(9)) == [PutOutcome.GRANTED]
    assert node.tiers() == {1: Tier.MEMORY, 2: Tier.DISK, 9: Tier.MEMORY}
    node.lease(9)
    assert node.put(chain(10)) == [PutOutcome.FULL]


def test_an_object_too_large_for_the_disk_stays_in_memory_until_its_space_is_needed() -> None:
    node = Tiered.make(8, 2, watermarks=Watermarks(evict_above=0.0, evict_share=0.0))
    node.put(chain(1, length=5 * ALIGNMENT))
    node.put(chain(2))
    node.copy(1)
    stores = node.demotions()
    assert [store.object.key for store in stores] == keys(2)
    node.written(stores)
    assert node.demotions() == []
    assert node.tiers() == {1: Tier.MEMORY, 2: Tier.DISK}
    assert node.put(chain(3, length=5 * ALIGNMENT)) == [PutOutcome.GRANTED]
    assert node.tiers() == {2: Tier.DISK, 3: Tier.MEMORY}


def test_a_lease_is_cut_where_memory_ends() -> None:
    node = Tiered.make(memory=3)
    node.put_on_disk(1, 2, 3)
    node.put(chain(9))
    node.lease(9)
    _, loads = node.lease(1, 2, 3)
    assert [load.object.key for load in loads] == keys(1, 2)
    node.state.validate()


def test_prefetch_loads_the_leading_run_as_far_as_there_is_room() -> None:
    node = Tiered.make(memory=2)
    node.put_on_disk(1, 2, 3)
    loads = node.state.leases.prefetch(keys(1, 2, 3))
    assert [load.object.key for load in loads] == keys(1, 2)
    assert node.state.leases.prefetch(keys(1, 2)) == [], "they are on their way"
    for load in loads:
        node.state.tier_moves.read_ended(load, True)
    assert node.in_memory() == [1, 2]


def test_a_full_disk_drops_its_coldest_leaf() -> None:
    node = Tiered.make(memory=4, disk=3)
    node.put(chain(1, 2))
    node.sink(1, 2)
    node.put_on_disk(3)
    node.use(2, 1)  # block 3 is now the coldest; block 1 is next, but has a follower
    for number in (4, 5):
        node.put(chain(number))
        node.copy(number)
        node.use(1)
    assert node.on_disk_only() == [1]
    assert node.in_memory() == [4, 5]


def test_a_disk_full_of_copies_of_what_is_in_memory_does_not_block_demotion() -> None:
    marks = Watermarks(evict_above=0.8, evict_share=0.1)
    node = Tiered.make(memory=10, disk=4, watermarks=marks)
    node.put_each(*range(1, 5))
    node.copy(1, 2, 3, 4)
    node.put_each(*range(5, 10))
    node.use(1, 2, 3, 4)
    stores = node.demotions()
    assert [store.object.key for store in stores] == [key(5), key(6)]
    node.written(stores)
    assert node.in_memory() == [1, 2, 3, 4, 7, 8, 9]
    assert node.on_disk_only() == [5, 6]
    assert node.state.counters["copies_dropped"] == 2
    assert node.state.catalog.usage().disk_live_bytes == node.state.catalog.usage().disk_limit_bytes


def test_a_disk_copy_is_not_dropped_for_another_copy_or_during_a_read() -> None:
    node = Tiered.make(memory=4, disk=1)
    node.put_each(1, 2)
    node.copy(1)
    found = node.state.catalog.find(key(2))
    assert found is not None
    assert node.state.tier_moves.copy(found) is None
    node.lease(1)
    assert not node.state.catalog.drop_some_disk_copy()
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


def test_the_latest_generation_found_at_a_restart_counts_and_new_ones_are_later() -> None:
    node = Tiered.make(disk=3)
    assert node.recover(1, 5)
    assert not node.recover(1, 4)
    assert node.recover(1, 600)
    assert node.recover(2, 9)
    assert node.kept() == keys(1, 2)
    node.put(chain(3))
    found = [node.state.catalog.find(key(number)) for number in (1, 3)]
    assert [stored and stored.generation > 600 for stored in found] == [False, True]


def test_an_object_found_while_its_key_is_written_is_released() -> None:
    node = Tiered.make()
    node.state.reservations.reserve("r", chain(1), 30.0, 0.0)
    assert not node.recover(1, 500)
    assert node.tiers() == {}


@pytest.mark.parametrize("written_meanwhile", [False, True])
def test_an_object_being_checked_stays_where_it_is(written_meanwhile: bool) -> None:
    marks = Watermarks(evict_above=0.0 if written_meanwhile else 1.0, evict_share=0.0)
    node = Tiered.make(memory=1, watermarks=marks)
    node.put(chain(1))
    stores = node.demotions()
    found = node.state.catalog.find(key(1))
    assert found is not None
    node.state.tier_moves.hold_for_check(found)
    node.written(stores)
    node.copy(1)
    assert node.put(chain(2)) == [PutOutcome.FULL]
    node.state.tier_moves.release_after_check(found)
    assert node.put(chain(2)) == [PutOutcome.GRANTED]
    assert node.tiers() == {1: Tier.DISK, 2: Tier.MEMORY}
