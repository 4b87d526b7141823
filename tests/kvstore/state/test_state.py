"""Leases, reservations and space: which are granted or refused, which objects are evicted, and that no space is lost or
shared. `test_tier_machine` covers any order of events, with two tiers."""

import pytest

from moonserve.kvstore.index_layout import Entry
from moonserve.kvstore.state.allocator import ALIGNMENT
from moonserve.kvstore.state.eviction.evictor import MAX_SKIPPED_VICTIMS
from moonserve.kvstore.state.objects import PutOutcome, Tier, Watermarks
from moonserve.protocol.errors import StaleLease
from tests.kvstore.state.tiered import TTL_S, Tiered, chain, key, keys


def test_an_object_is_visible_only_after_its_commit_was_verified() -> None:
    """An object is visible only after its commit was verified; reserved objects missing in the commit are dropped."""
    node = Tiered.make(4, None)
    state, writers = node.state, node.state.reservations
    writers.reserve("r", chain(1, 2, 3), TTL_S, 0.0)
    assert state.catalog.present(keys(1, 2)) == [False, False]
    assert writers.commit("r", {key(1): 11, key(2): 22}, 1.0) is None
    assert state.catalog.present(keys(1)) == [False]
    assert [item.checksum for item in writers.objects_to_verify("r")[1]] == [11, 22]
    writers.verified("r", [], 1.0)
    assert node.heard.parents == {key(1): None, key(2): key(1)}
    lease = state.leases.grant("l", keys(1, 2, 3), TTL_S, 1.0)
    assert [stored.checksum for stored in lease.objects] == [11, 22]
    assert state.leases.grant("l", keys(1), TTL_S, 1.5) is lease
    usage = state.catalog.usage()
    assert (usage.leased_bytes, usage.reserved_bytes) == (2 * ALIGNMENT, 0)
    state.validate()


def test_ended_ids_and_foreign_keys_are_refused() -> None:
    """Ended ids and keys of others are refused, also if an abort or a release arrives before the call that it ends."""
    node = Tiered.make(4, None)
    writers, readers = node.state.reservations, node.state.leases
    node.put(chain(9))
    assert writers.abort("aborted", 0.0) is None
    readers.release("released", 0.0)
    mine = writers.reserve("mine", chain(1), TTL_S, 0.0)
    for attempt in (
        lambda: writers.reserve("aborted", chain(2), TTL_S, 0.1),
        lambda: readers.grant("released", keys(9), TTL_S, 0.1),
        lambda: writers.reserve("mine", chain(3), TTL_S, 0.1),
        lambda: writers.commit("mine", {key(1): 1, key(9): 9}, 0.1),
    ):
        with pytest.raises(StaleLease):
            attempt()
    assert writers.reserve("mine", chain(1), TTL_S, 5.0) is mine
    assert writers.commit("mine", {key(1): 1}, 5.0) is None
    writers.verified("mine", [], 5.0)
    node.state.validate()


@pytest.mark.parametrize("first", ["r0", ""])
def test_ended_ids_are_kept_for_a_limited_time(first: str) -> None:
    writers = Tiered.make(4, None).state.reservations
    writers.abort(first, 0.0)
    for number in range(1, 100):
        writers.abort(f"r{number}", float(number))
    assert writers.reserve(first, chain(1), TTL_S, 100.0).objects
    with pytest.raises(StaleLease):
        writers.reserve("r99", chain(2), TTL_S, 100.0)


def test_expired_space_is_freed_only_after_its_window_is_closed() -> None:
    node = Tiered.make(1, None)
    node.state.reservations.reserve("r", chain(1), TTL_S, 0.0)
    assert node.state.next_deadline() == TTL_S
    assert node.state.expire(TTL_S - 0.1) == []
    with pytest.raises(StaleLease):  # although `expire` has not run since
        node.state.reservations.commit("r", {key(1): 1}, TTL_S)
    [reservation] = node.state.expire(TTL_S)
    assert node.put(chain(2)) == [PutOutcome.FULL]
    node.state.reservations.window_closed(reservation.reservation_id, TTL_S)
    assert node.put(chain(2)) == [PutOutcome.GRANTED]
    assert node.state.counters["reservations_expired"] == 1


def test_an_expired_lease_is_refused_and_never_revived() -> None:
    node = Tiered.make(4, None)
    node.put(chain(1))
    readers = node.state.leases
    readers.grant("l", keys(1), 10.0, 0.0)
    readers.renew("l", 10.0, 9.0)
    assert node.state.next_deadline() == 19.0
    with pytest.raises(StaleLease):
        readers.renew("l", 10.0, 19.0)
    assert node.state.catalog.usage().leased_bytes == ALIGNMENT
    node.state.expire(19.0)
    assert node.state.catalog.usage().leased_bytes == 0
    for attempt in (lambda: readers.renew("l", 1.0, 20.0), lambda: readers.grant("l", [], 1, 20)):
        with pytest.raises(StaleLease):
            attempt()
    assert node.state.counters["leases_expired"] == 1


Numbers = tuple[int, ...]
G, P, F = PutOutcome.GRANTED, PutOutcome.PRESENT, PutOutcome.FULL


@pytest.mark.parametrize(
    ("units", "before", "leased", "put", "outcomes", "left"),
    [
        pytest.param(4, [(1, 2, 3), (4,)], (1, 2, 3), (5,), [G], [1, 2, 3, 5], id="used last"),
        pytest.param(2, [(1,), (9,)], (), (1, 2), [P, G], [1, 2], id="not its own head"),
        pytest.param(2, [(9,)], (), (1, 2, 3, 4), [G, G, F, F], [1, 2], id="longer than the store"),
        pytest.param(3, [(1, 2, 3)], (), (5,), [G], [1, 2, 5], id="leaf first"),
    ],
)
def test_the_coldest_leaf_is_evicted_first(
    units: int, before: list[Numbers], leased: Numbers, put: Numbers, outcomes: list[PutOutcome], left: list[int]
) -> None:
    node = Tiered.make(units, None)
    for numbers in before:
        node.put(chain(*numbers))
    node.state.leases.release(node.lease(*leased)[0], 0.0)
    assert node.put(chain(*put)) == outcomes
    assert node.in_memory() == left


def test_leased_objects_and_useless_victims_are_not_evicted() -> None:
    node = Tiered.make(3, None)
    node.put_each(1, 2, 3)
    node.lease(1)
    behind_it = chain(4, 5)[1]  # it fits, but is of no use without its parent
    assert node.put([*chain(4, length=3 * ALIGNMENT), behind_it]) == [F, F]
    assert node.in_memory() == [1, 2, 3]
    assert node.put(chain(4)) == [G]
    assert node.in_memory() == [1, 3, 4]


def test_making_room_for_a_block_does_not_evict_its_parent() -> None:
    node = Tiered.make(2, None)
    node.put_each(1, 9)
    assert node.put(chain(1, 2)[1:]) == [G]
    assert node.in_memory() == [1, 2]


def test_above_the_watermark_a_share_is_evicted_ahead() -> None:
    node = Tiered.make(100, None, watermarks=Watermarks())
    node.put_each(*range(1, 91))
    assert len(node.in_memory()) == 90
    node.put(chain(91))
    assert node.in_memory() == list(range(7, 92))


def test_the_index_changes_before_space_is_given_to_others() -> None:
    """The index drops an entry before its space is given away, so that a reader notices and discards its copy."""
    node = Tiered.make(1, None)
    node.put(chain(1))
    catalog = node.state.catalog
    asked: list[Entry | None] = []
    allocate = catalog.allocator.allocate

    def watched(nbytes: int) -> int | None:
        found = catalog.find(key(1))
        offset = allocate(nbytes)
        asked.append(None if found is None or offset is None else Entry(0, 1, 0, 0, offset))
        return offset

    catalog.allocator.allocate = watched  # type: ignore[method-assign]
    node.put(chain(2))
    assert asked == [None, None], "whenever space was given, its old object was no longer found"


def test_the_search_for_a_victim_is_bounded_and_keeps_candidates() -> None:
    units = MAX_SKIPPED_VICTIMS + 8
    node = Tiered.make(memory=units, disk=2 * units)
    heads = range(1, units)
    for number in heads:
        node.put(chain(number, 1000 + number))
        node.sink(1000 + number)
    node.put(chain(9))
    leaf = 5000
    node.put(chain(leaf))
    assert node.put(chain(leaf + 1)) == [PutOutcome.FULL], "too many before it cannot go yet"
    node.copy(1)
    assert node.put(chain(leaf + 1)) == [PutOutcome.GRANTED]
    assert node.tiers()[1] is Tier.DISK


def test_metadata_of_an_object_is_small() -> None:
    node = Tiered.make(memory=20_000, disk=0)
    for start in range(1, 20_000, 1_000):
        node.put(chain(*range(start, start + 1_000)))
    assert node.state.catalog.metadata_bytes / len(node.state.catalog) < 200
