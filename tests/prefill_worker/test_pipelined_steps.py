"""A pipeline's leader has as many steps under way as there are stages, and a worker alone has one."""

from __future__ import annotations

from prefill_worker import actions as act
from prefill_worker import events as ev
from protocol.errors import PeerLost
from tests.prefill_worker.builders import HOME, make_request
from tests.prefill_worker.walks import Walk, all_of, kinds, only, spans


def test_consecutive_chunks_of_a_prompt_are_under_way_together() -> None:
    """Chunk i + 1 begins while chunk i is at a later stage; no more than there are stages; the last one samples."""
    walk = Walk(num_stages=2)
    first, second = all_of(walk.submit("r", 20, max_tokens=1), act.RunStep)
    third = only(walk.done(first, 1.0), act.RunStep)
    assert spans([first, second, third]) == [("r", 0, 8), ("r", 8, 16), ("r", 16, 20)]
    assert [step.plans[0].slice.samples for step in (first, second, third)] == [False, False, True]
    assert not walk.done(second, 2.0)
    sent = only(walk.done(third, 3.0), act.SendFirstToken)
    assert sent.report.compute_s == 3.0, "time that two steps share counts once"
    walk.assert_drained()


def test_the_next_prompt_follows_behind_the_last_chunk() -> None:
    """A pipeline is kept full across prompts."""
    walk = Walk(num_stages=3)
    walk.submit("r", 10, max_tokens=1)
    assert spans(walk.submit("s", 12, first=50, max_tokens=1)) == [("s", 0, 8)]


def test_a_prompt_that_would_be_one_step_is_shared_by_the_stages() -> None:
    """As long as nobody else keeps them busy; a few tokens are not worth a chunk of their own."""
    walk = Walk(num_stages=2, budget=128, num_blocks=64)
    steps = all_of(walk.submit("r", 101, max_tokens=1), act.RunStep)
    assert spans(steps) == [("r", 0, 51), ("r", 51, 101)]
    for step in steps:
        walk.done(step)
    assert spans(walk.submit("s", 15, first=500, max_tokens=1)) == [("s", 0, 15)]


def test_prompts_that_wait_keep_the_stages_busy_uncut() -> None:
    """Two prompts at two stages are done sooner than four halves."""
    walk = Walk(num_stages=2, budget=128, num_blocks=64)
    waiting = [walk.submit("q", 90, first=200), walk.submit("r", 100)]
    filler = all_of(walk.submit("s", 40, first=300, max_tokens=1), act.RunStep)
    assert spans(filler) == [("s", 0, 20), ("s", 20, 40)]
    for submission in waiting:
        assert not all_of(walk.grant(submission), act.RunStep)
    assert spans(walk.done(filler[0])) == [("q", 0, 90)]


def test_what_is_computed_behind_a_failed_chunk_is_never_shared() -> None:
    """A later chunk that was under way looked at blocks of which nobody knows what they hold."""
    walk = Walk(num_stages=2)
    first, second = all_of(walk.grant(walk.submit("q", 20)), act.RunStep)
    failed = ev.StepFailed(error=PeerLost("a stage is gone"), step_id=first.step_id)
    assert act.Fail in kinds(walk.handle(failed))
    walk.done(second)
    for _ in range(2):
        walk.written("q")
    keys = make_request("q", range(20)).block_keys
    assert not any(walk.state.pool.match_prefix([key]) for key in keys)


def test_blocks_stay_held_until_all_of_a_cancelled_prompts_steps_are_done() -> None:
    """A later stage may still write to them."""
    walk = Walk(num_stages=2)
    first, second = all_of(walk.submit("r", 20, max_tokens=1), act.RunStep)
    walk.cancel()
    walk.done(first)
    assert walk.state.num_held_blocks == 5
    walk.done(second)
    walk.assert_drained()


def test_a_group_computes_what_stores_hold() -> None:
    """A stored block is all layers at one place, and no stage has all layers."""
    actions = Walk(num_stages=2).submit("r", 20, sources=[(HOME, 0, 4)], max_tokens=1)
    assert kinds(actions) == [act.RunStep, act.RunStep]
