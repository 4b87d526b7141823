"""Stores are asked in time for what waiting requests will read, and not for more than is soon wanted."""

from __future__ import annotations

from prefill_worker import actions as act
from prefill_worker import events as ev
from prefill_worker.state import PrefillState
from protocol.errors import PeerLost
from protocol.ids import RequestId
from tests.prefill_worker.builders import (
    HOME,
    endpoint,
    granted,
    make_request,
    make_state,
    step_done,
    submitted,
)


def busy_state(*, max_prefetch_blocks: int = 8, policy: str = "fcfs") -> PrefillState:
    """Its pool is taken, so whatever comes next waits."""
    state = make_state(
        num_blocks=4, max_prefetch_blocks=max_prefetch_blocks, policy=policy, home=None
    )
    state.handle(submitted(make_request("running", range(16))), 0.0)
    return state


def come(
    state: PrefillState, number: int, *, num_blocks: int = 2, priority: int = 0
) -> list[act.PrefetchPrefix]:
    """A request of its own whose leading blocks are in the home store."""
    tokens = range(1000 * number, 1000 * number + 4 * num_blocks + 1)
    request = make_request(f"r{number}", tokens, priority=priority)
    actions = state.handle(submitted(request, sources=[(HOME, 0, num_blocks)]), 1.0)
    state.validate()
    return [action for action in actions if isinstance(action, act.PrefetchPrefix)]


def test_a_waiting_request_has_its_prefix_fetched_from_all_its_stores() -> None:
    state, far = busy_state(), endpoint("store-1")
    request = make_request("r", range(100, 113))
    actions = state.handle(submitted(request, sources=[(HOME, 0, 2), (far, 2, 1)]), 1.0)
    assert actions == [
        act.PrefetchPrefix(
            request_id=request.request_id,
            parts=(
                act.PrefetchPart(store=HOME, keys=request.block_keys[:2]),
                act.PrefetchPart(store=far, keys=request.block_keys[2:3]),
            ),
        )
    ]
    assert state.counters["prefetched_blocks"] == 3
    state.validate()


def test_a_request_that_is_admitted_at_once_reads_and_is_not_fetched_for() -> None:
    state = make_state()
    actions = state.handle(submitted(make_request("r", range(9)), sources=[(HOME, 0, 2)]), 0.0)
    assert [type(action) for action in actions] == [act.ReserveLanding, act.LoadPrefix]


def test_a_request_without_a_stored_prefix_is_not_fetched_for() -> None:
    state = busy_state()
    assert state.handle(submitted(make_request("r", range(9))), 1.0) == []
    state.validate()


def test_what_the_device_caches_is_not_fetched() -> None:
    state = make_state(num_blocks=4, home=None)
    first = make_request("first", range(5))
    reserve = state.handle(submitted(first), 0.0)[0]
    assert isinstance(reserve, act.ReserveLanding)
    step = state.handle(granted(reserve), 0.0)[0]
    assert isinstance(step, act.RunStep)
    state.handle(step_done(step), 0.0)
    request = make_request("r", range(13))
    actions = state.handle(submitted(request, sources=[(HOME, 0, 3)]), 1.0)
    [prefetch] = [a for a in actions if isinstance(a, act.PrefetchPrefix)]
    assert prefetch.parts == (act.PrefetchPart(store=HOME, keys=request.block_keys[1:3]),)
    state.validate()


def test_of_a_long_queue_only_the_head_is_fetched() -> None:
    """A thousand prefixes would drive each other out of the store's memory."""
    state = busy_state(max_prefetch_blocks=8)
    asked = [number for number in range(1, 1001) if come(state, number)]
    assert asked == [1, 2, 3, 4]


def test_the_next_ones_are_fetched_as_the_queue_moves() -> None:
    state = busy_state(max_prefetch_blocks=4)
    assert [bool(come(state, number)) for number in (1, 2, 3, 4)] == [True, True, False, False]
    cancelled = state.handle(ev.CancelRequested(request_id=RequestId("r1")), 2.0)
    [prefetch] = [a for a in cancelled if isinstance(a, act.PrefetchPrefix)]
    assert prefetch.request_id == "r3"
    assert not any(
        isinstance(a, act.PrefetchPrefix)
        for a in state.handle(ev.CancelRequested(request_id=RequestId("r4")), 2.0)
    )
    state.validate()


def test_an_admitted_request_makes_room_for_the_next() -> None:
    state = busy_state(max_prefetch_blocks=2)
    come(state, 1)
    assert come(state, 2) == []
    actions = state.handle(ev.CancelRequested(request_id=RequestId("running")), 2.0)
    assert not any(isinstance(a, act.PrefetchPrefix) for a in actions)  # it still has its blocks
    withdrawn = ev.LandingRefused(request_id=RequestId("running"), error=PeerLost("withdrawn"))
    actions = state.handle(withdrawn, 3.0)
    loads = [a.request_id for a in actions if isinstance(a, act.LoadPrefix)]
    prefetches = [a.request_id for a in actions if isinstance(a, act.PrefetchPrefix)]
    assert (loads, prefetches) == (["r1"], ["r2"])
    state.validate()


def test_a_prefix_larger_than_the_limit_is_fetched_up_to_it_and_alone() -> None:
    state = busy_state(max_prefetch_blocks=2)
    [prefetch] = come(state, 1, num_blocks=3)
    assert [len(part.keys) for part in prefetch.parts] == [2]
    assert come(state, 2, num_blocks=1) == []


def test_with_a_limit_of_zero_nothing_is_fetched() -> None:
    state = busy_state(max_prefetch_blocks=0)
    assert come(state, 1) == []


def test_urgent_requests_are_fetched_for_first() -> None:
    state = busy_state(max_prefetch_blocks=4, policy="priority")
    for number, priority in ((1, 0), (2, 0), (3, 0), (4, -1)):
        come(state, number, priority=priority)
    actions = state.handle(ev.CancelRequested(request_id=RequestId("r1")), 2.0)
    [prefetch] = [a for a in actions if isinstance(a, act.PrefetchPrefix)]
    assert prefetch.request_id == "r4"
    state.validate()
