"""A pipeline's leader has as many steps under way as there are stages, and a worker alone has one."""

from __future__ import annotations

from prefill_worker import actions as act
from prefill_worker import events as ev
from prefill_worker.state import PrefillState
from protocol.errors import PeerLost
from protocol.keys import block_keys, root_key
from tests.prefill_worker.builders import (
    BLOCK_SIZE,
    HOME,
    granted,
    make_request,
    make_state,
    step_done,
    submitted,
)

LOST = PeerLost("a stage is gone")


def steps_of(actions: list[act.Action]) -> list[act.RunStep]:
    return [action for action in actions if isinstance(action, act.RunStep)]


def checked(state: PrefillState, event: ev.Event, now: float) -> list[act.Action]:
    actions = state.handle(event, now)
    state.validate()
    return actions


def spans(steps: list[act.RunStep]) -> list[tuple[str, int, int]]:
    slices = [plan.slice for step in steps for plan in step.plans]
    return [(piece.request_id, piece.start, piece.end) for piece in slices]


def test_consecutive_chunks_of_a_prompt_are_under_way_together() -> None:
    """Chunk i + 1 begins while chunk i is at a later stage; no more than there are stages; the last one samples."""
    state = make_state(num_stages=2)
    prompt = make_request("r", range(20), max_tokens=1)
    first, second = steps_of(checked(state, submitted(prompt), 0.0))
    assert spans([first, second]) == [("r", 0, 8), ("r", 8, 16)]
    [third] = steps_of(checked(state, step_done(first), 1.0))
    assert spans([third]) == [("r", 16, 20)]
    assert [step.plans[0].slice.samples for step in (first, second, third)] == [False, False, True]
    assert not steps_of(checked(state, step_done(second), 2.0))
    actions = checked(state, step_done(third), 3.0)
    [sent] = [action for action in actions if isinstance(action, act.SendFirstToken)]
    assert sent.report.compute_s == 3.0, "time that two steps share counts once"
    assert state.is_idle


def test_the_next_prompt_follows_behind_the_last_chunk() -> None:
    """A pipeline is kept full across prompts."""
    state = make_state(num_stages=3)
    checked(state, submitted(make_request("r", range(10), max_tokens=1)), 0.0)
    actions = checked(state, submitted(make_request("s", range(50, 62), max_tokens=1)), 0.0)
    assert spans(steps_of(actions)) == [("s", 0, 8)]


def test_a_prompt_that_would_be_one_step_is_shared_by_the_stages() -> None:
    """As long as nobody else keeps them busy; a few tokens are not worth a chunk of their own."""
    state = make_state(num_stages=2, budget=128, num_blocks=64)
    steps = steps_of(checked(state, submitted(make_request("r", range(101), max_tokens=1)), 0.0))
    assert spans(steps) == [("r", 0, 51), ("r", 51, 101)]
    for step in steps:
        checked(state, step_done(step), 1.0)
    steps = steps_of(
        checked(state, submitted(make_request("s", range(500, 515), max_tokens=1)), 2.0)
    )
    assert spans(steps) == [("s", 0, 15)]


def test_prompts_that_wait_keep_the_stages_busy_uncut() -> None:
    """Two prompts at two stages are done sooner than four halves."""
    state = make_state(num_stages=2, budget=128, num_blocks=64)
    first, second = (make_request("q", range(200, 290)), make_request("r", range(100)))
    reserves = [
        action
        for request in (first, second)
        for action in checked(state, submitted(request), 0.0)
        if isinstance(action, act.ReserveLanding)
    ]
    filler = steps_of(
        checked(state, submitted(make_request("s", range(300, 340), max_tokens=1)), 0.0)
    )
    assert spans(filler) == [("s", 0, 20), ("s", 20, 40)]
    for reserve in reserves:
        assert not steps_of(checked(state, granted(reserve), 0.5))
    assert spans(steps_of(checked(state, step_done(filler[0]), 1.0))) == [("q", 0, 90)]


def test_a_worker_alone_has_one_step_at_a_time() -> None:
    """Nothing is different without a pipeline: the same actions, and no name for the step."""
    state = make_state()
    [first] = steps_of(checked(state, submitted(make_request("r", range(20), max_tokens=1)), 0.0))
    assert first == act.RunStep(plans=first.plans)
    [second] = steps_of(checked(state, step_done(first), 1.0))
    assert spans([second]) == [("r", 8, 16)]
    assert second.step_id == first.step_id


def test_what_is_computed_behind_a_failed_chunk_is_never_shared() -> None:
    """A later chunk that was under way looked at blocks of which nobody knows what they hold."""
    state = make_state(num_stages=2)
    tokens = range(20)
    reserve = next(
        action
        for action in checked(state, submitted(make_request("q", tokens)), 0.0)
        if isinstance(action, act.ReserveLanding)
    )
    first, second = steps_of(checked(state, granted(reserve), 0.0))
    actions = checked(state, ev.StepFailed(error=LOST, step_id=first.step_id), 1.0)
    assert any(isinstance(action, act.Fail) for action in actions)
    checked(state, step_done(second), 2.0)
    for _ in range(2):
        checked(state, ev.WritesDone(request_id=reserve.request_id), 3.0)
    keys = block_keys(root_key("test"), tokens, BLOCK_SIZE)
    assert not any(state.pool.match_prefix([key]) for key in keys)


def test_blocks_stay_held_until_all_of_a_cancelled_prompts_steps_are_done() -> None:
    """A later stage may still write to them."""
    state = make_state(num_stages=2)
    prompt = make_request("r", range(20), max_tokens=1)
    first, second = steps_of(checked(state, submitted(prompt), 0.0))
    checked(state, ev.CancelRequested(request_id=prompt.request_id), 0.5)
    checked(state, step_done(first), 1.0)
    assert state.num_held_blocks == 5
    checked(state, step_done(second), 2.0)
    assert state.num_held_blocks == 0
    assert state.is_idle


def test_a_group_computes_what_stores_hold() -> None:
    """A stored block is all layers at one place, and no stage has all layers."""
    state = make_state(num_stages=2)
    prompt = make_request("r", range(20), max_tokens=1)
    actions = checked(state, submitted(prompt, sources=[(HOME, 0, 4)]), 0.0)
    assert [type(action) for action in actions] == [act.RunStep, act.RunStep]
