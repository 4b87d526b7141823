"""Two tiers: what becomes of objects that are asked for, removed or lost while they move between memory and disk."""

from __future__ import annotations

from tests.kvstore.tiered import Tiered, chain, keys


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
