"""Preempted sequences are put into the store and read back, or are computed again, with the same tokens. Finished
sequences leave in the store the full blocks that only this worker has."""

import dataclasses

import pytest

from moonserve.decode_worker.decisions import events
from moonserve.decode_worker.decisions.offloading import OffloadCosts
from moonserve.protocol.kv_blocks import block_keys
from moonserve.protocol.step_time import PrefillProfile
from tests.decode_worker.driver import BLOCK_SIZE, CHEAP_STORE, ROOT, STORE, Driver, kept, next_token, request_of

OLD = [1, 2, 3, 4, 5]
NEW = [5, 6, 7, 8, 9, 10]
FAST = PrefillProfile(c0=0.0, c1=1e-9, c2=0.0)
WITH_ANSWERS = dataclasses.replace(CHEAP_STORE, with_answers=True)


def crowded(costs: OffloadCosts | None = CHEAP_STORE, num_blocks: int = 7) -> Driver:
    """Returns a driver with two sequences, of which the newer has just been preempted."""
    driver = Driver(num_blocks=num_blocks, keeping=costs)
    driver.find_store()
    driver.start(OLD, "old", max_tokens=16)
    driver.start(NEW, "new", max_tokens=14)
    driver.drain_to_preemption()
    return driver


def put_of(driver: Driver) -> events.StoreBlocks:
    (put,) = driver.all_of(events.StoreBlocks)
    return put


def load_of(driver: Driver) -> events.LoadBlocks:
    """Advances until a sequence is read back and returns the action."""
    while not driver.all_of(events.LoadBlocks):
        driver.advance()
    (load,) = driver.all_of(events.LoadBlocks)
    return load


def drain_right(driver: Driver) -> None:
    """Drains the driver and checks that both sequences sent each of their tokens once."""
    driver.drain()
    for name, prompt, most in (("old", OLD, 16), ("new", NEW, 14)):
        tokens = driver.tokens[name]
        assert [token.index for token in tokens] == list(range(1, most))
        expected = [next_token(len(prompt) + 1 + i) for i in range(most - 1)]
        assert [token.token_id for token in tokens] == expected


def test_a_preempted_sequence_is_put_and_read_back_and_goes_on() -> None:
    """Only blocks that are no longer in the pool are read back. Keys of blocks also cover the generated tokens."""
    driver = crowded()
    put = put_of(driver)
    assert put.store == STORE
    answer = [token.token_id for token in driver.tokens["new"]]
    keys = block_keys(ROOT, (*request_of(NEW, "new").token_ids, *answer), BLOCK_SIZE)
    assert [item.key for item in put.blocks] == keys[: len(put.blocks)]
    assert [item.parent for item in put.blocks] == [None, *keys][: len(put.blocks)]
    assert len(put.blocks) > len(NEW) // BLOCK_SIZE
    drain_right(driver)
    load = load_of(driver)
    assert set(load.keys) < {item.key for item in put.blocks}
    counters = driver.state.counters
    assert counters.preemptions_kept == 1
    assert counters.fetched_blocks == len(load.keys) > 0
    assert counters.recomputed_tokens <= BLOCK_SIZE  # the last block was not full


def test_blocks_being_put_are_held_and_released_together() -> None:
    driver = crowded()
    for item in put_of(driver).blocks:
        assert driver.pool.references_of(item.block) == 1
    free = driver.pool.num_free
    driver.cancel("new")  # the end of the sequence does not free them
    assert driver.pool.num_free == free
    driver.move()
    assert driver.pool.num_free >= free
    driver.drain()
    assert len(driver.tokens["old"]) == 15


def test_blocks_being_read_are_held_after_their_sequence_has_ended() -> None:
    """The blocks stay held until the read ends, and the worker is not idle before."""
    driver = crowded()
    load = load_of(driver)
    driver.cancel("new")
    driver.cancel("old")
    while driver.step is not None:
        driver.compute()
    assert all(driver.pool.references_of(block) == 1 for block in load.blocks)
    assert not driver.state.is_idle
    driver.move()
    assert not any(driver.pool.references_of(block) for block in load.blocks)
    assert driver.state.is_idle


@pytest.mark.parametrize("failed", [False, True])
def test_blocks_missing_in_the_store_are_computed_again(failed: bool) -> None:
    driver = crowded()
    load_of(driver)
    if not failed:
        driver.memory.store.clear()
    driver.move(failed=failed)
    drain_right(driver)
    assert driver.state.counters.fetched_blocks == 0
    assert driver.state.counters.recomputed_tokens > BLOCK_SIZE


def test_failed_put_costs_a_computation_and_disables_the_store() -> None:
    driver = crowded()
    driver.move(failed=True)
    drain_right(driver)
    assert driver.state.counters.keep_failures == 1
    assert not driver.all_of(events.LoadBlocks)
    put_of(driver)


def test_corrupt_blocks_are_forgotten() -> None:
    driver = crowded()
    put = put_of(driver)
    driver.moving.clear()
    bad = put.blocks[0].key
    driver.handle(kept(put, is_complete=False, corrupt=(bad,)))
    assert not driver.pool.match_prefix([bad])
    drain_right(driver)


def test_stored_blocks_are_not_put_again() -> None:
    driver = crowded(num_blocks=6)
    drain_right(driver)
    keys = [item.key for put in driver.all_of(events.StoreBlocks) for item in put.blocks]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    "costs", [None, dataclasses.replace(CHEAP_STORE, prefill=FAST)], ids=["no costs", "dear store"]
)
def test_blocks_cheaper_to_compute_are_not_put(costs: OffloadCosts | None) -> None:
    driver = crowded(costs)
    drain_right(driver)
    assert not driver.all_of(events.StoreBlocks)
    assert driver.state.counters.recomputed_tokens > 0


def test_a_store_that_turns_out_slow_is_not_used_again() -> None:
    driver = crowded(dataclasses.replace(CHEAP_STORE, prefill=dataclasses.replace(FAST, c1=0.1)))
    put = put_of(driver)
    driver.moving.clear()
    driver.handle(kept(put, is_complete=True, num_bytes=4096 * len(put.blocks), seconds=1e6))
    driver.drain()
    driver.start(OLD, "third", max_tokens=16)
    driver.start(NEW, "fourth", max_tokens=14)
    while driver.state.counters.num_preemptions < 2:
        driver.compute()
    assert put_of(driver) == put
    driver.drain()


def test_a_prompt_without_a_full_block_is_not_kept() -> None:
    driver = Driver(num_blocks=4, keeping=CHEAP_STORE)
    driver.find_store()
    driver.start([1, 2, 3], "old", max_tokens=13)
    driver.start([5, 6, 7], "new", max_tokens=8)
    driver.drain()
    assert driver.state.counters.num_preemptions > 0
    assert not driver.all_of(events.StoreBlocks)


def finished(driver: Driver, prompt: list[int] = OLD, max_tokens: int = 9) -> Driver:
    """Runs one sequence to its end."""
    driver.find_store()
    driver.start(prompt, max_tokens=max_tokens)
    driver.drain()
    return driver


def test_answer_is_put_and_found_by_the_next_turn() -> None:
    """Only the two full blocks that hold generated tokens are put; the first full block was prefilled."""
    driver = finished(Driver(keeping=WITH_ANSWERS))
    put = put_of(driver)
    answer = [token.token_id for token in driver.tokens["r"]]
    keys = block_keys(ROOT, (*request_of(OLD).token_ids, *answer), BLOCK_SIZE)
    assert [item.key for item in put.blocks] == keys[1:3]
    assert [item.parent for item in put.blocks] == keys[0:2]
    assert driver.state.counters.answers_kept == 1
    assert driver.state.counters.kept_blocks == 2
    found = driver.pool.match_prefix([item.key for item in put.blocks])
    assert found == [item.block for item in put.blocks]
    assert not any(driver.pool.references_of(block) for block in found)


@pytest.mark.parametrize(
    ("costs", "prompt", "max_tokens", "max_moves"),
    [
        pytest.param(CHEAP_STORE, OLD, 9, 64, id="not wanted"),
        pytest.param(WITH_ANSWERS, OLD, 3, 64, id="no full block"),
        pytest.param(WITH_ANSWERS, OLD[:2], 9, 64, id="a chain that begins nowhere"),
        pytest.param(None, OLD, 9, 64, id="no store"),
        pytest.param(WITH_ANSWERS, OLD, 9, 0, id="too much under way"),
    ],
)
def test_no_answer_is_put(
    costs: OffloadCosts | None, prompt: list[int], max_tokens: int, max_moves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonserve.decode_worker.decisions.offloading.MAX_MOVES_IN_FLIGHT", max_moves)
    driver = finished(Driver(keeping=costs), prompt, max_tokens)
    assert not driver.all_of(events.StoreBlocks)
    assert driver.state.counters.answers_dropped == (max_moves == 0)
