"""Prompts whose tokens' log-probabilities are wanted: all of them is computed, in steps of bounded logits, and what was
found leaves with the first token."""

from __future__ import annotations

from dataclasses import replace

from engine.batch import Sampled
from engine.prompt_scores import MAX_SCORED_TOKENS
from prefill_worker import actions as act
from prefill_worker import events as ev
from prefill_worker.pipeline.wire import (
    done_to_wire,
    plan_from_wire,
    plan_to_wire,
    sampled_from_wire,
)
from prefill_worker.state import PrefillState
from protocol.ids import RequestId
from protocol.request import Request
from tests.prefill_worker.builders import (
    BLOCK_SIZE,
    HOME,
    granted,
    make_request,
    make_state,
    step_done,
    submitted,
)
from tests.prefill_worker.walks import assert_drained, kinds, only, run_to_commit
from tests.scores import is_whole, pretend


def scored(name: str, length: int, num_emitted: int = 0) -> Request:
    request = make_request(name, range(length), num_emitted=num_emitted)
    return replace(request, sampling=replace(request.sampling, num_prompt_logprobs=2))


def first_step(state: PrefillState, request: Request) -> act.RunStep:
    reserve = only(state.handle(submitted(request), 10.0), act.ReserveLanding)
    return only(state.handle(granted(reserve), 10.0), act.RunStep)


def with_cached_prompt() -> PrefillState:
    """Its pool has the blocks of a prompt of ten tokens."""
    state = make_state(home=None, budget=16)
    run_to_commit(state, "earlier", 10)
    state.handle(ev.HandoffAccepted(request_id=RequestId("earlier")), 4.0)
    assert state.num_cached_blocks == 2
    return state


def test_neither_cached_nor_stored_blocks_are_used() -> None:
    state = with_cached_prompt()
    request = scored("r", 10)
    actions = state.handle(submitted(request, sources=[(HOME, 0, 2)]), 10.0)
    assert act.LoadPrefix not in kinds(actions)
    step = only(state.handle(granted(only(actions, act.ReserveLanding)), 10.0), act.RunStep)
    assert [(plan.slice.start, plan.slice.end) for plan in step.plans] == [(0, 10)]
    first = only(state.handle(step_done(step), 11.0), act.SendFirstToken)
    assert is_whole(first.report.prompt_logprobs, 10)
    assert first.report.cached_tokens == 0


def test_who_goes_on_after_a_loss_has_them_already() -> None:
    state = with_cached_prompt()
    step = first_step(state, scored("r", 10, num_emitted=2))
    assert step.plans[0].slice.start == 2 * BLOCK_SIZE
    assert step.plans[0].slice.scores is None
    first = only(state.handle(step_done(step), 11.0), act.SendFirstToken)
    assert first.report.prompt_logprobs is None


def test_a_step_holds_a_bounded_number_of_scored_tokens_and_others_beside_them() -> None:
    state = make_state(home=None, budget=4 * MAX_SCORED_TOKENS, num_blocks=400, lookahead=4)
    length = MAX_SCORED_TOKENS + 10
    step = first_step(state, scored("r", length))
    assert [plan.slice.end for plan in step.plans] == [MAX_SCORED_TOKENS]
    step = only(state.handle(step_done(step), 11.0), act.RunStep)
    assert [(plan.slice.start, plan.slice.end) for plan in step.plans] == [
        (MAX_SCORED_TOKENS, length)
    ]
    first = only(state.handle(step_done(step), 12.0), act.SendFirstToken)
    assert is_whole(first.report.prompt_logprobs, length)


def test_corrupt_blocks_are_recomputed_without_scoring_again() -> None:
    state = make_state(home=None, budget=16)
    step = first_step(state, scored("r", 10))
    state.handle(step_done(step), 11.0)
    only(state.handle(ev.WritesDone(request_id=RequestId("r")), 12.0), act.CommitHandoff)
    again = only(
        state.handle(ev.HandoffCorrupt(request_id=RequestId("r"), indexes=(1,)), 13.0), act.RunStep
    )
    assert again.plans[0].slice.scores is None
    actions = state.handle(step_done(again), 14.0)
    assert act.SendFirstToken not in kinds(actions)
    state.handle(ev.WritesDone(request_id=RequestId("r")), 15.0)
    state.handle(ev.HandoffAccepted(request_id=RequestId("r")), 16.0)
    assert_drained(state)


def test_the_last_stage_of_a_pipeline_scores_for_its_leader() -> None:
    """What it found is put into the scores of the leader's own slice."""
    state = make_state(home=None, budget=6)
    step = first_step(state, scored("r", 10))
    while True:
        there = [plan_from_wire(plan_to_wire(plan)) for plan in step.plans]
        for plan in there:
            pretend(plan.slice)
        sampled = [
            Sampled(request_id=plan.slice.request_id, token_id=42) if plan.slice.samples else None
            for plan in there
        ]
        reply = done_to_wire(there, sampled, [()] * len(there), is_last=True)
        back = [sampled_from_wire(*both) for both in zip(reply.slices, step.plans, strict=True)]
        [plan] = step.plans
        assert plan.slice.scores is not None
        assert is_whole(plan.slice.scores.result(), min(plan.slice.end + 1, 10))
        if back[0] is not None:
            break
        actions = state.handle(step_done(step), 11.0)
        step = only(actions, act.RunStep)
    middle = done_to_wire(there, [None], [()], is_last=False)
    assert not middle.slices[0].HasField("prompt_logprobs")
