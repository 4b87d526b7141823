"""Stores are asked to bring from disk what waiting requests will read: the head of the queue's, within a limit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prefill_worker import actions as act
from prefill_worker import events as ev
from protocol.errors import PeerLost
from protocol.ids import RequestId
from tests.prefill_worker.builders import HOME, endpoint, make_request
from tests.prefill_worker.walks import Walk, all_of, kinds, only
from worker.events import Action


def busy(*, max_prefetch_blocks: int = 8, policy: str = "fcfs") -> Walk:
    """Its pool is taken, so whatever comes next waits."""
    walk = Walk(num_blocks=4, max_prefetch_blocks=max_prefetch_blocks, policy=policy, home=None)
    walk.submit("running", 16)
    return walk


def fetched(actions: Sequence[Action]) -> list[str]:
    return [action.request_id for action in all_of(actions, act.PrefetchPrefix)]


def come(walk: Walk, number: int, *, num_blocks: int = 2, priority: int = 0) -> Sequence[Action]:
    """A request of its own whose leading blocks are in the home store."""
    return walk.submit(
        f"r{number}", 4 * num_blocks + 1, first=1000 * number, sources=[(HOME, 0, num_blocks)], priority=priority
    )


def test_a_waiting_request_has_its_prefix_fetched_from_all_its_stores() -> None:
    walk, far = busy(), endpoint("store-1")
    keys = make_request("r", range(100, 113)).block_keys
    assert walk.submit("r", 13, first=100, sources=[(HOME, 0, 2), (far, 2, 1)]) == [
        act.PrefetchPrefix(
            request_id=RequestId("r"),
            parts=(act.PrefetchPart(store=HOME, keys=keys[:2]), act.PrefetchPart(store=far, keys=keys[2:3])),
        )
    ]
    assert walk.state.counters["prefetched_blocks"] == 3


def test_what_is_read_at_once_or_lies_in_no_store_is_not_fetched() -> None:
    assert kinds(come(Walk(), 1)) == [act.ReserveLanding, act.LoadPrefix]
    assert busy().submit("r", 9) == []


def test_what_the_device_caches_is_not_fetched() -> None:
    walk = Walk(num_blocks=4, home=None)
    walk.done(walk.start("first", 5))
    prefetch = only(walk.submit("r", 13, sources=[(HOME, 0, 3)]), act.PrefetchPrefix)
    keys = make_request("r", range(13)).block_keys
    assert prefetch.parts == (act.PrefetchPart(store=HOME, keys=keys[1:3]),)


@pytest.mark.parametrize(("max_blocks", "num_asked"), [(0, 0), (4, 2), (8, 4)])
def test_of_a_long_queue_only_the_head_is_fetched(max_blocks: int, num_asked: int) -> None:
    """A thousand prefixes would drive each other out of the store's memory. The next ones follow as the queue moves."""
    walk = busy(max_prefetch_blocks=max_blocks)
    asked = [number for number in range(1, 101) if come(walk, number)]
    assert asked == list(range(1, num_asked + 1))
    assert fetched(walk.cancel("r1")) == ([f"r{num_asked + 1}"] if num_asked else [])
    assert not fetched(walk.cancel("r99"))


def test_an_admitted_request_makes_room_for_the_next() -> None:
    walk = busy(max_prefetch_blocks=2)
    come(walk, 1)
    assert come(walk, 2) == []
    assert not fetched(walk.cancel("running"))  # it still has its blocks
    withdrawn = ev.LandingRefused(request_id=RequestId("running"), error=PeerLost("withdrawn"))
    actions = walk.handle(withdrawn)
    assert [load.request_id for load in all_of(actions, act.LoadPrefix)] == ["r1"]
    assert fetched(actions) == ["r2"]


def test_a_prefix_larger_than_the_limit_is_fetched_up_to_it_and_alone() -> None:
    walk = busy(max_prefetch_blocks=2)
    prefetch = only(come(walk, 1, num_blocks=3), act.PrefetchPrefix)
    assert [len(part.keys) for part in prefetch.parts] == [2]
    assert come(walk, 2, num_blocks=1) == []


def test_urgent_requests_are_fetched_for_first() -> None:
    walk = busy(max_prefetch_blocks=4, policy="priority")
    for number, priority in ((1, 0), (2, 0), (3, 0), (4, -1)):
        come(walk, number, priority=priority)
    assert fetched(walk.cancel("r1")) == ["r4"]
