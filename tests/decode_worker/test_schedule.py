"""Continuous batching, growth and preemption: events in, steps and tokens out."""

from __future__ import annotations

import pytest

from decode_worker import actions, events
from engine.batch import Sampled
from protocol.errors import DeadlineExceeded, InvalidRequest, PeerError
from protocol.ids import GatewayId, RequestId
from protocol.request import FinishReason
from tests.decode_worker.driver import Driver, next_token, only, request_of


def test_a_sequence_generates_until_max_tokens_and_frees_its_blocks() -> None:
    driver = Driver()
    driver.start([1, 2, 3, 4, 5], max_tokens=4)
    driver.drain()
    tokens = driver.tokens["r"]
    assert [token.index for token in tokens] == [1, 2, 3]
    assert [token.token_id for token in tokens] == [next_token(6 + i) for i in range(3)]
    assert [token.finish_reason for token in tokens] == [None, None, FinishReason.LENGTH]


def test_a_sequence_ends_at_max_model_len() -> None:
    driver = Driver(max_model_len=8)
    driver.start([1, 2, 3, 4, 5])
    driver.drain()
    assert [token.index for token in driver.tokens["r"]] == [1, 2]
    assert driver.tokens["r"][-1].finish_reason is FinishReason.LENGTH


def test_a_new_sequence_joins_the_step_after_the_one_under_way() -> None:
    driver = Driver()
    driver.start([1], "a")
    assert only(driver.start([1, 2], "b"), actions.RunStep) == []
    driver.compute()
    assert driver.step_of() == [("a", 2, 3), ("b", 2, 3)]


def test_the_tokens_of_a_step_leave_as_one_message_per_gateway() -> None:
    driver = Driver()
    driver.start([1], "a", gateway_id="g1")
    driver.start([2], "b", gateway_id="g2")
    driver.start([3], "c", gateway_id="g1")
    driver.compute()
    sent = only(driver.compute(), actions.SendTokens)
    assert [(s.gateway_id, [t.request_id for t in s.tokens]) for s in sent] == [
        ("g1", ["a", "c"]),
        ("g2", ["b"]),
    ]


def test_the_next_step_starts_before_the_tokens_of_the_last_one_leave() -> None:
    driver = Driver()
    driver.start([1])
    assert [type(action) for action in driver.compute()] == [actions.RunStep, actions.SendTokens]


def test_at_most_max_num_seqs_run_and_the_others_keep_their_blocks() -> None:
    driver = Driver(max_num_seqs=1)
    driver.start([1], "a", max_tokens=2)
    driver.start([2], "b")
    assert (driver.state.num_running, driver.state.num_waiting) == (1, 1)
    assert driver.state.num_held_blocks == 2
    driver.compute()
    assert driver.step_of() == [("b", 1, 2)]


def test_waiting_sequences_start_by_priority() -> None:
    driver = Driver(max_num_seqs=1)
    driver.start([1], "a", max_tokens=2)
    driver.start([2], "low", priority=5)
    driver.start([3], "high", priority=-5)
    driver.compute()
    assert driver.step_of() == [("high", 1, 2)]


def test_a_cancelled_sequence_frees_its_blocks_when_its_step_ends() -> None:
    driver = Driver()
    driver.start([1, 2, 3, 4])
    driver.cancel("r")
    assert driver.state.num_free_blocks == 14  # the step still writes them
    done = driver.compute()
    assert only(done, actions.SendTokens) == []
    assert driver.state.num_free_blocks == 16


def test_a_lost_gateways_sequences_end_without_a_word() -> None:
    driver = Driver()
    driver.start([1], "a", gateway_id="gone")
    driver.start([1], "b", gateway_id="here")
    driver.handle(events.GatewayLost(gateway_id=GatewayId("gone")))
    driver.compute()
    assert driver.step_of() == [("b", 1, 2)]
    assert not driver.failures


def test_a_request_that_takes_too_long_fails_with_its_deadline() -> None:
    driver = Driver()
    driver.start([1], timeout_s=3.0)
    driver.now = 3.0
    driver.compute()
    (failure,) = driver.failures["r"]
    assert isinstance(failure.error, DeadlineExceeded)
    driver.drain()


def test_a_failed_step_fails_its_sequences_and_the_others_go_on() -> None:
    driver = Driver()
    driver.start([1], "a")
    driver.start([2], "b")
    driver.fail_step(PeerError("no memory"))
    assert list(driver.failures) == ["a"]
    assert driver.step_of() == [("b", 1, 2)]


def test_a_second_attempt_at_a_request_replaces_the_first() -> None:
    driver = Driver()
    driver.start([1], "a")
    driver.reserve([1, 2], "a", lease_id="again")
    driver.commit(request_of([1, 2], "a"), lease_id="again")
    driver.verify()
    driver.close()
    driver.compute()
    assert driver.step_of() == [("a", 2, 3)]


def test_the_newest_sequence_is_preempted_when_no_block_is_left() -> None:
    driver = Driver(num_blocks=4)
    driver.start([1, 2, 3], "old")
    driver.start([5, 6, 7], "new")
    driver.compute()
    driver.drain_to_preemption()
    assert [entry[0] for entry in driver.step_of()] == ["old"]
    assert driver.state.num_waiting == 1
    assert driver.state.counters.num_preemptions == 1


def test_a_low_priority_sequence_is_preempted_before_a_newer_one() -> None:
    driver = Driver(num_blocks=4)
    driver.start([1, 2, 3], "low", priority=1)
    driver.start([5, 6, 7], "new")
    driver.drain_to_preemption()
    assert [entry[0] for entry in driver.step_of()] == ["new"]


def test_a_preempted_sequence_is_recomputed_in_chunks_and_repeats_no_token() -> None:
    driver = Driver(num_blocks=6, max_num_batched_tokens=4)
    driver.start([1, 2, 3], "old", max_tokens=12)
    driver.start([5, 6, 7, 8, 9, 10], "new", max_tokens=8)
    driver.drain()
    assert driver.state.counters.num_preemptions > 0
    assert driver.state.counters.recomputed_tokens > 0
    assert [token.index for token in driver.tokens["new"]] == list(range(1, 8))
    assert [t.token_id for t in driver.tokens["new"]] == [next_token(7 + i) for i in range(7)]
    assert [token.index for token in driver.tokens["old"]] == list(range(1, 12))


def test_recomputation_never_exceeds_the_token_budget() -> None:
    driver = Driver(num_blocks=8, max_num_seqs=3, max_num_batched_tokens=5)
    for name in ("a", "b", "c"):
        driver.start([1, 2, 3, 4, 5, 6, 7], name, max_tokens=10)
    while driver.step is not None:
        assert sum(piece.num_tokens for piece in driver.step.slices) <= 5
        driver.compute()
    assert driver.state.counters.recomputed_tokens > 0
    driver.drain()
    assert all(len(driver.tokens[name]) == 9 for name in ("a", "b", "c"))


def test_a_restored_sequence_re_uses_its_prompts_blocks_while_they_are_cached() -> None:
    driver = Driver(num_blocks=5)
    driver.start([1, 2, 3, 4, 5], "old", max_tokens=10)
    driver.start([1, 2, 3, 4, 6], "new", max_tokens=12)
    while driver.state.counters.num_preemptions == 0:
        driver.compute()
    while "new" not in [entry[0] for entry in driver.step_of()]:
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
    """The running sequence gives way to a better-ranked one that waits for a slot."""
    driver = Driver(num_blocks=4, max_num_seqs=max_num_seqs)
    driver.start([1, 2, 3], "low", priority=9, max_tokens=9)
    driver.start([5, 6, 7, 8, 9], "high", max_tokens=6)
    driver.drain()
    assert len(driver.tokens["low"]) == 8
    assert len(driver.tokens["high"]) == 5


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_who_cannot_follow_its_grammar_fails_alone(runs_ahead: bool) -> None:
    driver = Driver(runs_ahead=runs_ahead)
    driver.start([1], "a", max_tokens=30)
    driver.start([2], "b", max_tokens=20)
    while [piece.request_id for piece in driver.steps[0].slices] != ["a", "b"]:
        driver.compute()
    sampled = [
        Sampled(request_id=RequestId("a"), token_id=0, failure="it cannot be followed"),
        Sampled(request_id=RequestId("b"), token_id=next_token(driver.steps[0].slices[1].end)),
    ]
    driver.steps.popleft()
    driver.handle(events.StepDone(sampled=sampled))
    driver.drain()
    [failure] = driver.failures["a"]
    assert isinstance(failure.error, InvalidRequest)
    assert driver.tokens["b"][-1].finish_reason is FinishReason.LENGTH
