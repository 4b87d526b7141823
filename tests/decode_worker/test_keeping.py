"""Preempted sequences go to the store and come back, or are computed again: never another token for it."""

from __future__ import annotations

import dataclasses

import pytest

from decode_worker import actions, events
from decode_worker.keeping import KeepingCosts
from protocol.keys import block_keys
from protocol.profile import PrefillProfile
from tests.decode_worker.driver import (
    BLOCK_SIZE,
    CHEAP_STORE,
    ROOT,
    STORE,
    Driver,
    next_token,
    only,
    request_of,
)

OLD = [1, 2, 3, 4, 5]
NEW = [5, 6, 7, 8, 9, 10]


def crowded(costs: KeepingCosts | None = CHEAP_STORE, num_blocks: int = 7) -> Driver:
    """The newer of two has just given way."""
    driver = Driver(num_blocks=num_blocks, keeping=costs)
    driver.find_store()
    driver.start(OLD, "old", max_tokens=16)
    driver.start(NEW, "new", max_tokens=14)
    driver.drain_to_preemption()
    return driver


def all_right(driver: Driver) -> None:
    """Everybody has had all tokens, once."""
    for name, prompt, most in (("old", OLD, 16), ("new", NEW, 14)):
        tokens = driver.tokens[name]
        assert [token.index for token in tokens] == list(range(1, most))
        first = len(prompt) + 1
        assert [token.token_id for token in tokens] == [
            next_token(first + i) for i in range(most - 1)
        ]


def test_a_preempted_sequence_is_put_and_read_back_and_goes_on() -> None:
    driver = crowded()
    (put,) = driver.all_of(actions.KeepBlocks)
    assert put.store == STORE
    driver.drain()
    (load,) = driver.all_of(actions.LoadBlocks)
    assert set(load.keys) <= {item.key for item in put.blocks}
    counters = driver.state.counters
    assert counters.preemptions_kept == 1
    assert counters.fetched_blocks == len(load.keys) > 0
    assert counters.recomputed_tokens <= BLOCK_SIZE  # the last block was not full
    all_right(driver)


def test_keys_go_on_over_what_was_generated() -> None:
    driver = crowded()
    (put,) = driver.all_of(actions.KeepBlocks)
    tokens = request_of(NEW, "new").token_ids + tuple(
        token.token_id for token in driver.tokens["new"]
    )
    keys = block_keys(ROOT, tokens, BLOCK_SIZE)
    assert [item.key for item in put.blocks] == keys[: len(put.blocks)]
    assert [item.parent for item in put.blocks] == [None, *keys][: len(put.blocks)]
    assert len(put.blocks) > len(NEW) // BLOCK_SIZE
    driver.drain()


def test_blocks_that_are_being_put_are_nobodys_and_come_free_together() -> None:
    driver = crowded()
    (put,) = driver.all_of(actions.KeepBlocks)
    for item in put.blocks:
        assert driver.pool.references_of(item.block) == 1
    free = driver.pool.num_free
    driver.cancel("new")  # whatever becomes of their sequence
    assert driver.pool.num_free == free
    driver.move()
    assert driver.pool.num_free >= free
    driver.drain()
    assert len(driver.tokens["old"]) == 15


def test_blocks_that_are_being_read_are_not_given_away_when_their_sequence_ends() -> None:
    driver = crowded()
    while not driver.all_of(actions.LoadBlocks):
        driver.advance()
    (load,) = driver.all_of(actions.LoadBlocks)
    driver.cancel("new")
    assert all(driver.pool.references_of(block) == 1 for block in load.blocks)
    driver.move()
    assert not any(driver.pool.references_of(block) for block in load.blocks)
    driver.drain()


def test_what_the_store_has_lost_is_computed_again() -> None:
    driver = crowded()
    while not driver.all_of(actions.LoadBlocks):
        driver.advance()
    driver.memory.store.clear()
    driver.drain()
    assert driver.state.counters.fetched_blocks == 0
    assert driver.state.counters.recomputed_tokens > BLOCK_SIZE
    all_right(driver)


def test_what_nobody_took_meanwhile_is_still_in_the_pool() -> None:
    driver = crowded()
    (put,) = driver.all_of(actions.KeepBlocks)
    driver.drain()
    (load,) = driver.all_of(actions.LoadBlocks)
    assert len(load.keys) < len(put.blocks)


def test_a_put_that_fails_costs_a_computation_and_nobody_goes_there_until_it_is_found() -> None:
    driver = crowded()
    driver.move(failed=True)
    driver.drain()
    assert driver.state.counters.keep_failures == 1
    assert not driver.all_of(actions.LoadBlocks)
    assert len(driver.all_of(actions.KeepBlocks)) == 1
    all_right(driver)


def test_a_read_that_fails_costs_a_computation() -> None:
    driver = crowded()
    while not driver.all_of(actions.LoadBlocks):
        driver.advance()
    driver.move(failed=True)
    driver.drain()
    assert driver.state.counters.recomputed_tokens > BLOCK_SIZE
    all_right(driver)


def test_corrupt_blocks_are_forgotten() -> None:
    driver = crowded()
    (put,) = driver.all_of(actions.KeepBlocks)
    driver.moving.clear()
    checksums = tuple(item.checksum or 1 for item in put.blocks)
    bad = put.blocks[0]
    driver.handle(
        events.Kept(move_id=put.move_id, checksums=checksums, is_complete=False, corrupt=(bad.key,))
    )
    assert not driver.pool.match_prefix([bad.key])
    driver.drain()
    all_right(driver)


def test_what_was_put_need_not_be_put_again() -> None:
    driver = crowded(num_blocks=6)
    driver.drain()
    puts = driver.all_of(actions.KeepBlocks)
    keys = [item.key for put in puts for item in put.blocks]
    assert len(keys) == len(set(keys))
    all_right(driver)


FAST = PrefillProfile(c0=0.0, c1=1e-9, c2=0.0)


@pytest.mark.parametrize(
    "costs", [None, dataclasses.replace(CHEAP_STORE, prefill=FAST)], ids=["no costs", "dear store"]
)
def test_where_computing_is_cheaper_nothing_is_put(costs: KeepingCosts | None) -> None:
    driver = crowded(costs)
    driver.drain()
    assert not driver.all_of(actions.KeepBlocks)
    assert driver.state.counters.recomputed_tokens > 0
    all_right(driver)


def test_a_store_that_turns_out_slow_is_not_used_again() -> None:
    driver = crowded(dataclasses.replace(CHEAP_STORE, prefill=dataclasses.replace(FAST, c1=0.1)))
    (put,) = driver.all_of(actions.KeepBlocks)
    driver.moving.clear()
    driver.handle(
        events.Kept(
            move_id=put.move_id,
            checksums=(1,) * len(put.blocks),
            is_complete=True,
            num_bytes=4096 * len(put.blocks),
            seconds=1e6,
        )
    )
    driver.drain()
    driver.start(OLD, "third", max_tokens=16)
    driver.start(NEW, "fourth", max_tokens=14)
    while driver.state.counters.num_preemptions < 2:
        driver.compute()
    assert only(driver.log, actions.KeepBlocks) == [put]
    driver.drain()


def test_a_prompt_without_a_full_block_is_not_kept() -> None:
    driver = Driver(num_blocks=4, keeping=CHEAP_STORE)
    driver.find_store()
    driver.start([1, 2, 3], "old", max_tokens=13)
    driver.start([5, 6, 7], "new", max_tokens=8)
    driver.drain()
    assert driver.state.counters.num_preemptions > 0
    assert not driver.all_of(actions.KeepBlocks)


def test_a_worker_is_not_idle_while_blocks_move() -> None:
    driver = crowded()
    driver.cancel("old")
    driver.cancel("new")
    while driver.step is not None:
        driver.compute()
    assert driver.moving
    assert not driver.state.is_idle
    driver.move()
    assert driver.state.is_idle
