"""What finished sequences leave in the home store: the full blocks that only this worker has."""

from __future__ import annotations

import dataclasses

import pytest

from decode_worker import actions
from decode_worker.keeping import MAX_MOVES, KeepingCosts
from protocol.keys import block_keys
from tests.decode_worker.driver import BLOCK_SIZE, CHEAP_STORE, ROOT, Driver, request_of

PROMPT = [1, 2, 3, 4, 5]
WITH_ANSWERS = dataclasses.replace(CHEAP_STORE, with_answers=True)


def finished(
    driver: Driver, name: str = "r", prompt: list[int] = PROMPT, max_tokens: int = 9
) -> list[actions.KeepBlocks]:
    """The puts that follow from a sequence that ran to its end."""
    driver.find_store()
    driver.start(prompt, name, max_tokens=max_tokens)
    driver.drain()
    return driver.all_of(actions.KeepBlocks)


def test_an_answer_is_put_from_the_block_on_in_which_it_begins() -> None:
    """5 + 9 tokens of which the last one's KV is never computed: 3 full blocks, and the first was prefilled."""
    driver = Driver(keeping=WITH_ANSWERS)
    (put,) = finished(driver)
    answer = [token.token_id for token in driver.tokens["r"]]
    keys = block_keys(ROOT, (*request_of(PROMPT).token_ids, *answer), BLOCK_SIZE)
    assert [item.key for item in put.blocks] == keys[1:3]
    assert [item.parent for item in put.blocks] == keys[0:2]
    assert driver.state.counters.answers_kept == 1
    assert driver.state.counters.kept_blocks == 2


def test_kept_answers_are_found_by_the_next_turn_and_nobody_holds_them() -> None:
    driver = Driver(keeping=WITH_ANSWERS)
    (put,) = finished(driver)
    assert driver.state.is_idle
    found = driver.pool.match_prefix([item.key for item in put.blocks])
    assert found == [item.block for item in put.blocks]
    assert not any(driver.pool.references_of(block) for block in found)


@pytest.mark.parametrize(
    ("costs", "prompt", "max_tokens"),
    [
        pytest.param(CHEAP_STORE, PROMPT, 9, id="not wanted"),
        pytest.param(WITH_ANSWERS, PROMPT, 3, id="no full block"),
        pytest.param(WITH_ANSWERS, PROMPT[:2], 9, id="a chain that begins nowhere"),
        pytest.param(None, PROMPT, 9, id="no store"),
    ],
)
def test_nothing_is_put(costs: KeepingCosts | None, prompt: list[int], max_tokens: int) -> None:
    assert finished(Driver(keeping=costs), prompt=prompt, max_tokens=max_tokens) == []


def test_what_is_too_much_for_the_store_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("decode_worker.keeping.MAX_MOVES", 0)
    assert MAX_MOVES > 0
    driver = Driver(keeping=WITH_ANSWERS)
    assert finished(driver) == []
    assert driver.state.counters.answers_dropped == 1
