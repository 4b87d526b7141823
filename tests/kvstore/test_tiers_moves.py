"""Two tiers: what becomes of objects that are asked for, removed or lost while they move between memory and disk."""

from __future__ import annotations

import pytest

from kvstore.allocator import ALIGNMENT
from protocol.errors import StaleLease
from tests.kvstore.tiered import Tiered, chain, full, keys


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
