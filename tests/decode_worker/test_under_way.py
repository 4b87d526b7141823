"""Steps that run ahead: which sequences they have, what waits for a decision, and who ends when."""

from __future__ import annotations

from decode_worker import actions
from protocol.errors import PeerError
from tests.decode_worker.driver import BLOCK_SIZE, Driver, only

PROMPT = list(range(6))


def ahead(num_blocks: int = 16, **changes: int | bool) -> Driver:
    return Driver(num_blocks, runs_ahead=True, **changes)


def steps_of(driver: Driver) -> list[list[tuple[str, int, bool]]]:
    """(request, position, follows) of the steps under way, oldest first."""
    return [[(p.request_id, p.start, p.follows) for p in s.slices] for s in driver.steps]


def test_a_step_begins_before_the_one_before_has_said_anything() -> None:
    driver = ahead()
    driver.start(PROMPT)
    assert steps_of(driver) == [[("r", 6, False)], [("r", 7, True)]]
    done = driver.compute()
    assert steps_of(driver) == [[("r", 7, True)], [("r", 8, True)]]
    assert isinstance(done[0], actions.RunStep), "tokens travel while the engine computes"
    assert [token.index for token in driver.tokens["r"]] == [1]


def test_without_running_ahead_there_is_one_step_at_a_time() -> None:
    driver = Driver()
    driver.start(PROMPT)
    assert steps_of(driver) == [[("r", 6, False)]]


def test_a_last_token_that_is_foreseen_is_the_last_one_computed() -> None:
    driver = ahead()
    driver.start(PROMPT, max_tokens=3)  # the first one came from prefill
    assert steps_of(driver) == [[("r", 6, False)], [("r", 7, True)]]
    driver.compute()
    assert steps_of(driver) == [[("r", 7, True)]]
    driver.compute()
    assert driver.state.is_idle
    assert [token.index for token in driver.tokens["r"]] == [1, 2]


def test_a_token_behind_the_end_is_dropped_and_holds_the_blocks_until_it_is_computed() -> None:
    driver = ahead()
    driver.start(PROMPT, stops_after=2)
    done = driver.compute()
    assert [token.finish_reason is None for token in driver.tokens["r"]] == [False]
    assert not only(done, actions.RunStep)
    assert driver.pool.num_free < driver.pool.num_blocks, "a step still writes there"
    driver.compute()
    assert len(driver.tokens["r"]) == 1
    assert driver.state.is_idle
    assert driver.pool.num_free == driver.pool.num_blocks


def test_who_is_cancelled_during_two_steps_is_free_after_the_second() -> None:
    driver = ahead()
    driver.start(PROMPT)
    driver.cancel("r")
    driver.compute()
    assert driver.pool.num_free < driver.pool.num_blocks
    driver.compute()
    assert driver.pool.num_free == driver.pool.num_blocks
    assert "r" not in driver.tokens


def test_who_lands_meanwhile_joins_the_next_step_that_begins() -> None:
    driver = ahead()
    driver.start(PROMPT, "a")
    driver.start([50, 51], "b")
    assert [len(step.slices) for step in driver.steps] == [1, 1]
    driver.compute()
    assert steps_of(driver)[1] == [("a", 8, True), ("b", 2, False)]


def test_nobody_is_preempted_while_a_step_is_under_way() -> None:
    """Two sequences grow into a pool that holds one and a half: the step ahead waits instead."""
    driver = ahead(num_blocks=5)
    for name in ("a", "b"):
        driver.start([hash(name) % 7, *range(5)], name, max_tokens=12)
    while not driver.state.counters.num_preemptions:
        before = len(driver.steps)
        driver.compute()
    assert before == 1, "the pipeline was empty"
    driver.drain()
    for name in ("a", "b"):
        assert [token.index for token in driver.tokens[name]] == list(range(1, 12))


def test_what_follows_a_failed_step_is_lost_with_it() -> None:
    driver = ahead()
    driver.start(PROMPT)
    driver.fail_step(PeerError("broken"))
    assert len(driver.failures["r"]) == 1
    driver.fail_step(PeerError("broken"))
    assert len(driver.failures["r"]) == 1
    assert driver.pool.num_free == driver.pool.num_blocks


def test_a_sequence_gets_its_next_block_ahead_of_time() -> None:
    driver = ahead()
    driver.start(list(range(BLOCK_SIZE - 1)))
    assert [piece.end for step in driver.steps for piece in step.slices] == [
        BLOCK_SIZE,
        BLOCK_SIZE + 1,
    ]
    assert len(driver.steps[1].slices[0].block_table) == 2
