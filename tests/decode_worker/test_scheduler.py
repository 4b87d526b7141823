"""Continuous batching, growth, preemption and steps that run ahead, tested as events, steps and tokens without I/O."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.decode_worker.decisions import events
from moonserve.decode_worker.decisions.steps import StepTimeCorrection
from moonserve.engine.model.batch import Sampled
from moonserve.protocol.errors import DeadlineExceeded, InvalidRequest, MoonserveError, PeerError
from moonserve.protocol.request import FinishReason, GatewayId, RequestId
from tests.decode_worker.driver import Driver, next_token, request_of
from tests.prefill_worker.builders import all_of


def names(driver: Driver) -> list[str]:
    """Returns the requests in the oldest step in flight."""
    return [name for name, _, _ in driver.step_of()]


@pytest.mark.parametrize(("max_model_len", "num_tokens"), [(1_000, 3), (8, 2)])
def test_a_sequence_generates_until_a_limit_and_frees_its_blocks(max_model_len: int, num_tokens: int) -> None:
    driver = Driver(max_model_len=max_model_len)
    driver.start([1, 2, 3, 4, 5], max_tokens=4)
    driver.drain()
    tokens = driver.tokens["r"]
    assert [token.index for token in tokens] == list(range(1, num_tokens + 1))
    assert [token.token_id for token in tokens] == [next_token(6 + i) for i in range(num_tokens)]
    reasons = [token.finish_reason for token in tokens]
    assert reasons == [None] * (num_tokens - 1) + [FinishReason.LENGTH]


def test_the_tokens_of_a_step_leave_as_one_message_per_gateway_behind_the_next_step() -> None:
    """Sequences that arrived during the step join the next one."""
    driver = Driver()
    driver.start([1], "a", gateway="g1")
    assert all_of(driver.start([2], "b", gateway="g2"), events.RunStep) == []
    driver.start([3], "c", gateway="g1")
    driver.compute()
    assert names(driver) == ["a", "b", "c"]
    done = driver.compute()
    assert [type(action) for action in done] == [events.RunStep, *[events.SendTokens] * 2]
    sent = all_of(done, events.SendTokens)
    assert [(s.gateway_id, [t.request_id for t in s.tokens]) for s in sent] == [("g1", ["a", "c"]), ("g2", ["b"])]


def test_at_most_max_num_seqs_run_and_the_others_start_by_priority() -> None:
    driver = Driver(max_num_seqs=1)
    driver.start([1], "a", max_tokens=2)
    driver.start([2], "low", priority=5)
    driver.start([3], "high", priority=-5)
    assert (driver.state.num_running, driver.state.num_waiting) == (1, 2)
    assert driver.state.num_held_blocks == 3
    driver.compute()
    assert driver.step_of() == [("high", 1, 2)]


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_cancelled_sequence_frees_its_blocks_when_its_steps_end(num_steps: int) -> None:
    driver = Driver(runs_ahead=num_steps == 2)
    driver.start([1, 2, 3, 4])
    driver.cancel("r")
    for _ in range(num_steps):
        assert driver.pool.num_free < 16  # a step still writes them
        driver.compute()
    assert driver.pool.num_free == 16
    assert "r" not in driver.tokens


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda driver: driver.handle(events.GatewayLost(gateway_id=GatewayId("gone"))), {}),
        (lambda driver: driver.wait(3.0), {"a": DeadlineExceeded}),
        (lambda driver: driver.fail_step(PeerError("no memory")), {"a": PeerError}),
    ],
)
def test_one_sequence_ends_and_the_other_continues(
    end: Callable[[Driver], object], told: dict[str, type[MoonserveError]]
) -> None:
    driver = Driver()
    driver.start([1], "a", gateway="gone", timeout_s=3.0)
    driver.start([1], "b", gateway="here")
    end(driver)
    if "a" in names(driver):
        driver.compute()
    assert names(driver) == ["b"]
    assert {name: type(fails[0].error) for name, fails in driver.failures.items()} == told


def test_a_second_attempt_at_a_request_replaces_the_first() -> None:
    driver = Driver()
    driver.start([1], "a")
    driver.reserve([1, 2], "a", lease_id="again")
    driver.commit(request_of([1, 2], "a"), lease_id="again")
    driver.drain_landing()
    driver.compute()
    assert driver.step_of() == [("a", 2, 3)]


@pytest.mark.parametrize(("priority", "goes_on"), [(0, "old"), (1, "new")])
def test_the_newest_of_the_least_urgent_is_preempted_when_no_block_is_left(priority: int, goes_on: str) -> None:
    driver = Driver(num_blocks=4)
    driver.start([1, 2, 3], "old", priority=priority)
    driver.start([5, 6, 7], "new")
    driver.drain_to_preemption()
    assert names(driver) == [goes_on]
    assert driver.state.num_waiting == driver.state.counters.num_preemptions == 1


def test_a_restored_sequence_re_uses_its_prompts_blocks_while_they_are_cached() -> None:
    driver = Driver(num_blocks=5)
    driver.start([1, 2, 3, 4, 5], "old", max_tokens=10)
    driver.start([1, 2, 3, 4, 6], "new", max_tokens=12)
    driver.drain_to_preemption()
    while "new" not in names(driver):
        driver.compute()
    assert ("new", 4) in [entry[:2] for entry in driver.step_of()]
    driver.drain()


def test_reservations_wait_until_preempted_sequences_have_blocks_again() -> None:
    driver = Driver(num_blocks=4)
    driver.start([1, 2, 3], "old", max_tokens=13)
    driver.start([5, 6, 7], "new", max_tokens=8)
    driver.drain_to_preemption()
    assert driver.reserve([9], "late", wait_s=1e6) == []
    while driver.grant_of("lease-late") is None:
        driver.compute()
    assert driver.state.num_waiting == 0


def test_a_sequence_that_outgrows_the_whole_pool_fails() -> None:
    driver = Driver(num_blocks=2)
    driver.start([1, 2, 3])
    driver.drain()
    (failure,) = driver.failures["r"]
    assert isinstance(failure.error, InvalidRequest)
    assert [token.index for token in driver.tokens["r"]] == [1, 2, 3, 4, 5]


def test_a_sequence_waits_for_landings_when_they_hold_the_rest_of_the_pool() -> None:
    driver = Driver(num_blocks=5)
    driver.reserve(list(range(10)), "landing", ttl_s=5.0)
    driver.start([1, 2, 3], "r", max_tokens=8)
    while driver.step is not None:
        driver.compute()
    driver.wait(5.0)
    driver.close()
    assert driver.step_of() == [("r", 8, 9)]


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_no_deadlock_when_a_preempted_one_and_a_blocked_one_wait(max_num_seqs: int) -> None:
    """A running sequence gives way to a better-ranked one that waits for a slot, so that both finish."""
    driver = Driver(num_blocks=4, max_num_seqs=max_num_seqs)
    driver.start([1, 2, 3], "low", priority=9, max_tokens=9)
    driver.start([5, 6, 7, 8, 9], "high", max_tokens=6)
    driver.drain()
    assert len(driver.tokens["low"]) == 8
    assert len(driver.tokens["high"]) == 5


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_sequence_that_cannot_follow_its_grammar_fails_alone(runs_ahead: bool) -> None:
    driver = Driver(runs_ahead=runs_ahead)
    driver.start([1], "a", max_tokens=30)
    driver.start([2], "b", max_tokens=20)
    while names(driver) != ["a", "b"]:
        driver.compute()
    step = driver.steps.popleft()
    sampled = [
        Sampled(request_id=RequestId("a"), token_id=0, failure="it cannot be followed"),
        Sampled(request_id=RequestId("b"), token_id=next_token(step.slices[1].end)),
    ]
    driver.handle(events.StepDone(sampled=sampled))
    driver.drain()
    [failure] = driver.failures["a"]
    assert isinstance(failure.error, InvalidRequest)
    assert driver.tokens["b"][-1].finish_reason is FinishReason.LENGTH


# -- steps that run ahead

PROMPT = list(range(6))


def steps_of(driver: Driver) -> list[list[tuple[str, int, bool]]]:
    """Returns (request, position, follows) for each slice of the steps in flight, oldest first."""
    return [[(p.request_id, p.start, p.token_from_previous_step) for p in s.slices] for s in driver.steps]


def test_step_begins_before_the_previous_one_has_ended() -> None:
    """With `runs_ahead`, a step begins before the previous one ends, up to the last token by `max_tokens`."""
    driver = Driver(runs_ahead=True)
    driver.start(PROMPT, max_tokens=4)  # including the first one, from prefill
    assert steps_of(driver) == [[("r", 6, False)], [("r", 7, True)]]
    done = driver.compute()
    assert steps_of(driver) == [[("r", 7, True)], [("r", 8, True)]]
    assert isinstance(done[0], events.RunStep), "tokens travel while the engine computes"
    driver.compute()
    assert steps_of(driver) == [[("r", 8, True)]]
    driver.compute()
    assert driver.state.is_idle
    assert [token.index for token in driver.tokens["r"]] == [1, 2, 3]


def test_a_token_behind_the_end_is_dropped_and_holds_the_blocks_until_it_is_computed() -> None:
    driver = Driver(runs_ahead=True)
    driver.start(PROMPT, stops_after=2)
    assert not all_of(driver.compute(), events.RunStep)
    assert driver.pool.num_free < driver.pool.num_blocks, "a step still writes there"
    driver.compute()
    assert len(driver.tokens["r"]) == 1
    assert driver.state.is_idle
    assert driver.pool.num_free == driver.pool.num_blocks


def test_sequence_that_lands_joins_the_next_step() -> None:
    driver = Driver(runs_ahead=True)
    driver.start(PROMPT, "a")
    driver.start([50, 51], "b")
    assert [len(step.slices) for step in driver.steps] == [1, 1]
    driver.compute()
    assert steps_of(driver)[1] == [("a", 8, True), ("b", 2, False)]


def test_no_sequence_is_preempted_while_a_step_is_in_flight() -> None:
    """When two sequences outgrow a pool, a preemption waits until no other step is in flight."""
    driver = Driver(5, runs_ahead=True)
    for first, name in enumerate(("a", "b")):
        driver.start([first, *range(5)], name, max_tokens=12)
    while not driver.state.counters.num_preemptions:
        before = len(driver.steps)
        driver.compute()
    assert before == 1, "the pipeline was empty"
    driver.drain()
    for name in ("a", "b"):
        assert [token.index for token in driver.tokens[name]] == list(range(1, 12))


def test_steps_after_a_failed_one_are_discarded() -> None:
    driver = Driver(runs_ahead=True)
    driver.start(PROMPT)
    for _ in range(2):
        driver.fail_step(PeerError("broken"))
        assert len(driver.failures["r"]) == 1
    assert driver.pool.num_free == driver.pool.num_blocks


def after(*ratios: float) -> float:
    pace = StepTimeCorrection()
    for ratio in ratios:
        pace.observe(0.01, 0.01 * ratio)
    return pace.factor


def test_step_time_correction_follows_reports_and_decays() -> None:
    assert after(*[3.0] * 100) == pytest.approx(3.0, rel=0.01)
    assert after(*[3.0] * 100, *[1.0] * 100) == pytest.approx(1.0, rel=0.01)
    assert after(1_000.0) < 1.2, "one stall moves it little"
    assert after(*[0.1] * 100) == 1.0


@given(
    st.lists(st.tuples(st.floats(allow_nan=True, allow_infinity=True), st.floats(allow_nan=True, allow_infinity=True)))
)
def test_step_time_correction_is_bounded_for_any_report(steps: list[tuple[float, float]]) -> None:
    pace = StepTimeCorrection()
    for predicted_s, actual_s in steps:
        pace.observe(predicted_s, actual_s)
    assert 1.0 <= pace.factor < math.inf
