"""Which computed blocks are put into the home store."""

from __future__ import annotations

import pytest

from prefill_worker import actions as act
from prefill_worker import events as ev
from prefill_worker.state import PrefillState
from protocol.keys import BlockKey
from protocol.request import Request
from tests.prefill_worker.builders import (
    HOME,
    make_request,
    make_state,
    step_done,
    submitted,
)
from tests.prefill_worker.walks import assert_drained


def prefill(state: PrefillState, request: Request) -> list[BlockKey]:
    """Computes the whole prompt; the keys that are put behind it, which the store takes."""
    put_keys: list[BlockKey] = []
    actions = state.handle(submitted(request), 0.0)
    while actions:
        steps = [action for action in actions if isinstance(action, act.RunStep)]
        puts = [action for action in actions if isinstance(action, act.PutBlocks)]
        actions = []
        for put in puts:
            put_keys += [item.key for item in put.items]
            done = ev.PutDone(put_id=put.put_id, num_refused=0, corrupt=())
            actions += state.handle(done, 1.0)
        for step in steps:
            actions += state.handle(step_done(step), 1.0)
        state.validate()
    return put_keys


@pytest.mark.parametrize(
    ("store_writes", "in_turn"), [("all", [2, 0, 0, 0]), ("hot", [0, 2, 0, 0])]
)
def test_a_block_is_put_when_it_is_computed_or_when_it_was_reused(
    store_writes: str, in_turn: list[int]
) -> None:
    state = make_state(store_writes=store_writes)
    state.handle(ev.HomeStoreFound(store=HOME), 0.0)
    request = make_request("r", range(9), max_tokens=1)
    for number, num_put in enumerate(in_turn):
        again = make_request(f"r{number}", range(9), max_tokens=1)
        assert prefill(state, again) == list(request.block_keys[:num_put])
    assert_drained(state)


def test_of_a_prompt_only_the_part_that_others_share_is_hot() -> None:
    state = make_state(store_writes="hot")
    state.handle(ev.HomeStoreFound(store=HOME), 0.0)
    put: list[BlockKey] = []
    for number in range(2):
        own = range(100 * (number + 1), 100 * (number + 1) + 5)
        request = make_request(f"r{number}", [0, 1, 2, 3, *own], max_tokens=1)
        put += prefill(state, request)
    assert put == list(request.block_keys[:1])
    assert_drained(state)


def test_what_was_evicted_begins_anew() -> None:
    """Its count is forgotten with it, so counts take no memory of their own."""
    state = make_state(num_blocks=3, store_writes="hot")
    state.handle(ev.HomeStoreFound(store=HOME), 0.0)
    assert prefill(state, make_request("a", range(9), max_tokens=1)) == []
    prefill(state, make_request("other", range(50, 62), max_tokens=1))
    assert prefill(state, make_request("b", range(9), max_tokens=1)) == []
    assert len(prefill(state, make_request("c", range(9), max_tokens=1))) == 2
    assert_drained(state)
