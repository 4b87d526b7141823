"""Prompts whose tokens' log-probabilities are wanted: all of them is computed, in steps of bounded logits, and what was
found leaves with the first token."""

from __future__ import annotations

from dataclasses import replace

from engine.batch import MAX_SCORED_TOKENS, Sampled
from prefill_worker import actions as act
from prefill_worker.pipeline.wire import done_to_wire, plan_from_wire, plan_to_wire, sampled_from_wire
from protocol.request import Request
from tests.prefill_worker.builders import BLOCK_SIZE, HOME, make_request
from tests.prefill_worker.walks import Walk, kinds, only, spans
from tests.scores import is_whole, pretend


def scored(length: int, num_emitted: int = 0) -> Request:
    request = make_request("r", range(length), num_emitted=num_emitted)
    return replace(request, sampling=replace(request.sampling, num_prompt_logprobs=2))


def first_step(walk: Walk, request: Request) -> act.RunStep:
    return only(walk.grant(walk.request(request)), act.RunStep)


def with_cached_prompt() -> Walk:
    """Its pool has the blocks of a prompt of ten tokens."""
    walk = Walk(home=None, budget=16)
    walk.commit("earlier", 10)
    walk.accept("earlier")
    assert walk.state.pool.num_cached == 2
    return walk


def test_neither_cached_nor_stored_blocks_are_used() -> None:
    walk = with_cached_prompt()
    actions = walk.request(scored(10), sources=[(HOME, 0, 2)])
    assert act.LoadPrefix not in kinds(actions)
    step = only(walk.grant(actions), act.RunStep)
    assert spans([step]) == [("r", 0, 10)]
    report = only(walk.done(step), act.SendFirstToken).report
    assert is_whole(report.prompt_logprobs, 10)
    assert report.cached_tokens == 0


def test_who_goes_on_after_a_loss_has_them_already() -> None:
    walk = with_cached_prompt()
    step = first_step(walk, scored(10, num_emitted=2))
    assert step.plans[0].slice.start == 2 * BLOCK_SIZE
    assert step.plans[0].slice.scores is None
    assert only(walk.done(step), act.SendFirstToken).report.prompt_logprobs is None


def test_a_step_holds_a_bounded_number_of_scored_tokens() -> None:
    walk = Walk(home=None, budget=4 * MAX_SCORED_TOKENS, num_blocks=400, lookahead=4)
    length = MAX_SCORED_TOKENS + 10
    step = first_step(walk, scored(length))
    again = only(walk.done(step), act.RunStep)
    assert spans([step, again]) == [("r", 0, MAX_SCORED_TOKENS), ("r", MAX_SCORED_TOKENS, length)]
    assert is_whole(only(walk.done(again), act.SendFirstToken).report.prompt_logprobs, length)


def test_corrupt_blocks_are_recomputed_without_scoring_again() -> None:
    walk = Walk(home=None, budget=16)
    walk.done(first_step(walk, scored(10)))
    only(walk.written(), act.CommitHandoff)
    again = only(walk.corrupt(1), act.RunStep)
    assert again.plans[0].slice.scores is None
    assert act.SendFirstToken not in kinds(walk.done(again))
    walk.written()
    walk.accept()
    walk.assert_drained()


def test_the_last_stage_of_a_pipeline_scores_for_its_leader() -> None:
    """What it found is put into the scores of the leader's own slice."""
    walk = Walk(home=None, budget=6)
    step = first_step(walk, scored(10))
    while True:
        there = [plan_from_wire(plan_to_wire(plan)) for plan in step.plans]
        for plan in there:
            pretend(plan.slice)
        sampled = [
            Sampled(request_id=plan.slice.request_id, token_id=42) if plan.slice.samples else None for plan in there
        ]
        reply = done_to_wire(there, sampled, [()] * len(there), is_last=True)
        back = [sampled_from_wire(*both) for both in zip(reply.slices, step.plans, strict=True)]
        [plan] = step.plans
        assert plan.slice.scores is not None
        assert is_whole(plan.slice.scores.result(), min(plan.slice.end + 1, 10))
        if back[0] is not None:
            break
        step = only(walk.done(step), act.RunStep)
    middle = done_to_wire(there, [None], [()], is_last=False)
    assert not middle.slices[0].HasField("prompt_logprobs")
