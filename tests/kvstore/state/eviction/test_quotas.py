"""Quotas of tenants: the choice of evicted objects, refused puts, and that every byte is charged to a share."""

from collections.abc import Callable

import pytest

from moonserve.kvstore.disk.base import Pin
from moonserve.kvstore.state.allocator import ALIGNMENT
from moonserve.kvstore.state.eviction.policies import LeastRecentlyUsed
from moonserve.kvstore.state.eviction.quotas import MAX_TENANTS, TenantShares
from moonserve.kvstore.state.objects import PutOutcome, Tier
from tests.kvstore.state.tiered import UNIT, Tiered, chain, keys

GRANTED, FULL = PutOutcome.GRANTED, PutOutcome.FULL


def test_a_tenant_over_its_quota_evicts_its_own_coldest_only() -> None:
    node = Tiered.make(memory=8, quotas={"alice": 2})
    node.put(chain(1, tenant="bob"))
    for number in (2, 3, 4):
        assert node.put(chain(number, tenant="alice")) == [GRANTED]
    assert node.in_memory() == [1, 3, 4]
    assert node.state.catalog.usage().tenant_bytes == {"alice": 2 * ALIGNMENT}


def test_an_object_being_written_is_charged_until_it_is_aborted() -> None:
    node = Tiered.make(memory=8, quotas={"alice": 2})
    node.state.reservations.reserve("r", chain(1, 2, tenant="alice"), 30.0, 0.0)
    assert node.put(chain(3, tenant="alice")) == [FULL]
    node.state.reservations.abort("r", 1.0)
    node.state.reservations.window_closed("r", 1.0)
    assert node.put(chain(3, 4, tenant="alice")) == [GRANTED, GRANTED]
    assert node.in_memory() == [3, 4]


def test_an_object_larger_than_its_tenants_quota_evicts_nothing() -> None:
    node = Tiered.make(memory=8, quotas={"alice": 2})
    node.put(chain(1, 2, tenant="alice"))
    assert node.put(chain(3, length=3 * ALIGNMENT, tenant="alice")) == [FULL]
    assert node.in_memory() == [1, 2]


def test_a_tenant_whose_objects_cannot_go_is_refused_while_others_are_not() -> None:
    node = Tiered.make(memory=4, quotas={"alice": 2})
    node.put(chain(1, 2, tenant="alice", pin=Pin.HARD))
    assert node.put(chain(3, tenant="alice")) == [FULL]
    assert node.put(chain(4, 5, 6, tenant="bob")) == [GRANTED, GRANTED, FULL]
    assert node.in_memory() == [1, 2, 4, 5]


def test_objects_on_disk_count_and_go_first() -> None:
    node = Tiered.make(memory=8, quotas={"alice": 2})
    node.put_each(1, 2, tenant="alice")
    node.sink(2)
    assert node.put(chain(3, tenant="alice")) == [GRANTED]
    assert node.in_memory() == [1, 3]


def test_an_object_with_children_on_disk_is_skipped() -> None:
    node = Tiered.make(memory=8, quotas={"alice": 2})
    node.put(chain(1, tenant="alice"))
    node.put(chain(1, 2)[1:])  # a follower of another tenant
    node.sink(2)
    node.put(chain(3, tenant="alice"))
    assert node.put(chain(4, tenant="alice")) == [GRANTED]
    assert node.tiers() == {1: Tier.MEMORY, 2: Tier.DISK, 4: Tier.MEMORY}


def test_the_share_with_the_highest_relative_use_makes_room() -> None:
    node = Tiered.make(memory=4, disk=0, quotas={"alice": 3})
    node.put(chain(1, tenant="alice"))
    node.put_each(2, 3, 4)
    node.put(chain(5, tenant="alice"))
    assert node.in_memory() == [1, 3, 4, 5]


@pytest.mark.parametrize(
    ("happens", "left"),
    [
        (lambda node: None, [1, 3, 4, 5]),  # without a disk the others have no share
        (lambda node: node.state.catalog.use_disk(node.disk), [2, 3, 4, 5]),
        (lambda node: [node.state.catalog.use_disk(node.disk), node.state.forget_disk()], [1, 3, 4, 5]),
    ],
)
def test_a_disk_enlarges_common_share_while_it_is_there(happens: Callable[[Tiered], object], left: list[int]) -> None:
    node = Tiered.make(memory=4, disk=0, quotas={"alice": 4})
    node.disk.live_limit = 16 * UNIT
    happens(node)
    node.put(chain(1, tenant="alice"))
    node.put_each(2, 3, 4, 5)
    assert node.in_memory() == left


def test_a_tenant_with_a_quota_keeps_it_however_many_names_are_in_use() -> None:
    shares = TenantShares(100, {"alice": 10}, LeastRecentlyUsed)
    numbers = {shares.number(f"tenant-{count}") for count in range(MAX_TENANTS + 5)}
    assert max(numbers) == MAX_TENANTS
    assert shares.number("one more") == 0, "counts as no tenant"
    assert shares.share_of(shares.number("alice")) is shares.share_with_quota("alice")


def test_soft_pinned_objects_are_evicted_last() -> None:
    node = Tiered.make(memory=2, disk=0)
    node.put(chain(1, pin=Pin.SOFT))
    node.put_each(2, 3)
    assert node.in_memory() == [1, 3]
    node.state.pin(keys(3), Pin.SOFT)
    node.put(chain(4))
    assert node.in_memory() == [3, 4]


def test_hard_pinned_objects_stay_until_they_are_unpinned() -> None:
    node = Tiered.make(memory=2, disk=0)
    node.put(chain(1, 2, pin=Pin.HARD))
    assert node.put(chain(3)) == [FULL]
    assert node.state.pin(keys(2, 9), Pin.NONE) == 1
    assert node.put(chain(3)) == [GRANTED]
    assert node.in_memory() == [1, 3]
