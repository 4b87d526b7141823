"""Composition of prefill steps: pipeline stages, order of arrival and rank, and prompt log-probabilities."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from moonserve.engine.model.batch import MAX_SCORED_TOKENS, Sampled
from moonserve.prefill_worker.decisions import events as ev
from moonserve.prefill_worker.decisions.shared_state import RequestQueue
from moonserve.prefill_worker.pipeline_stage import done_to_wire, plan_from_wire, plan_to_wire, sampled_from_wire
from moonserve.protocol.errors import PeerLost
from moonserve.protocol.request import Request
from tests.prefill_worker.builders import (
    BLOCK_SIZE,
    HOME,
    Walk,
    all_of,
    kinds,
    make_request,
    make_sequence,
    only,
    spans,
)
from tests.scores import is_whole, pretend


def test_consecutive_chunks_of_a_prompt_are_under_way_together() -> None:
    """Chunk i + 1 begins while chunk i is at a later stage. At most one chunk per stage is in flight."""
    walk = Walk(num_stages=2)
    first, second = all_of(walk.submit("r", 20, max_tokens=1), ev.RunStep)
    third = only(walk.done(first, 1.0), ev.RunStep)
    assert spans([first, second, third]) == [("r", 0, 8), ("r", 8, 16), ("r", 16, 20)]
    assert [step.plans[0].slice.samples for step in (first, second, third)] == [False, False, True]
    assert not walk.done(second, 2.0)
    sent = only(walk.done(third, 3.0), ev.SendFirstToken)
    assert sent.report.compute_s == 3.0, "time that two steps share counts once"
    walk.assert_drained()


def test_the_next_prompt_follows_behind_the_last_chunk() -> None:
    """The free stages of a pipeline take up the next prompt."""
    walk = Walk(num_stages=3)
    walk.submit("r", 10, max_tokens=1)
    assert spans(walk.submit("s", 12, first=50, max_tokens=1)) == [("s", 0, 8)]


def test_a_prompt_that_would_be_one_step_is_shared_by_the_stages() -> None:
    """Without other prompts, a prompt is cut into one chunk per stage, unless the chunks would be too small."""
    walk = Walk(num_stages=2, budget=128, num_blocks=64)
    steps = all_of(walk.submit("r", 101, max_tokens=1), ev.RunStep)
    assert spans(steps) == [("r", 0, 51), ("r", 51, 101)]
    for step in steps:
        walk.done(step)
    assert spans(walk.submit("s", 15, first=500, max_tokens=1)) == [("s", 0, 15)]


def test_prompts_that_wait_keep_the_stages_busy_uncut() -> None:
    """Waiting prompts are not cut: two whole prompts at two stages end sooner than four halves."""
    walk = Walk(num_stages=2, budget=128, num_blocks=64)
    waiting = [walk.submit("q", 90, first=200), walk.submit("r", 100)]
    filler = all_of(walk.submit("s", 40, first=300, max_tokens=1), ev.RunStep)
    assert spans(filler) == [("s", 0, 20), ("s", 20, 40)]
    for submission in waiting:
        assert not all_of(walk.grant(submission), ev.RunStep)
    assert spans(walk.done(filler[0])) == [("q", 0, 90)]


def test_what_is_computed_behind_a_failed_chunk_is_never_shared() -> None:
    """Blocks of a later chunk in flight are not published: it read blocks whose content is undefined."""
    walk = Walk(num_stages=2)
    first, second = all_of(walk.grant(walk.submit("q", 20)), ev.RunStep)
    failed = ev.StepFailed(error=PeerLost("a stage is gone"), step_id=first.step_id)
    assert ev.Fail in kinds(walk.handle(failed))
    walk.done(second)
    for _ in range(2):
        walk.written("q")
    keys = make_request("q", range(20)).block_keys
    assert not any(walk.state.pool.match_prefix([key]) for key in keys)


def test_blocks_stay_held_until_all_of_a_cancelled_prompts_steps_are_done() -> None:
    """Blocks stay held while any step of the prompt is in flight, since a later stage may still write them."""
    walk = Walk(num_stages=2)
    first, second = all_of(walk.submit("r", 20, max_tokens=1), ev.RunStep)
    walk.cancel()
    walk.done(first)
    assert walk.state.num_held_blocks == 5
    walk.done(second)
    walk.assert_drained()


def test_a_group_computes_what_stores_hold() -> None:
    """A pipeline group reads no stored blocks: they have all layers, and no stage has all layers."""
    actions = Walk(num_stages=2).submit("r", 20, sources=[(HOME, 0, 4)], max_tokens=1)
    assert kinds(actions) == [ev.RunStep, ev.RunStep]


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 20.0)), max_size=30))
def test_later_arrivals_beyond_the_rank_do_not_overtake(arrivals: list[tuple[float, float]]) -> None:
    """A request runs before all that arrive later than its arrival plus its rank. `arrivals` has gaps and ranks."""
    queue, now = RequestQueue(), 0.0
    came: dict[str, tuple[float, float]] = {}
    for number, (gap_s, rank) in enumerate(arrivals):
        now += gap_s
        came[f"r{number}"] = (now, rank)
        queue.push(make_sequence(f"r{number}", rank=rank, number=number, now=now))
    order = []
    while (head := queue.head()) is not None:
        queue.remove(head)
        order.append(came[head.request_id])
    assert len(order) == len(arrivals)
    for place, (arrived_at, rank) in enumerate(order):
        assert all(other <= arrived_at + rank for other, _ in order[:place])


def test_better_rank_is_prepared_beyond_the_limit() -> None:
    """With two requests prepared ahead, a third long request waits, but one of better rank is prepared at once."""
    walk = Walk(prepare_ahead=2, budget=4, num_blocks=64, home=None)
    prepared = [
        bool(all_of(walk.submit(f"long{n}", 16, first=100 * n, rank=100.0), ev.ReserveLanding)) for n in range(3)
    ]
    assert prepared == [True, True, False]
    short = only(walk.submit("short", 4, first=900, rank=1.0, at=5.0), ev.ReserveLanding)
    assert short.request_id == "short"


def test_a_request_of_lower_rank_runs_before_the_rest_of_one_that_runs() -> None:
    """A short prompt of lower rank runs between two chunks of a long one."""
    walk = Walk(budget=4, num_blocks=64, home=None)
    step = walk.start("long", 16, rank=100.0)
    walk.grant(walk.submit("short", 4, first=900, at=1.0))
    step = only(walk.done(step), ev.RunStep)
    assert spans([step]) == [("short", 0, 4)]
    assert spans(walk.done(step)) == [("long", 4, 8)]


def scored(length: int, num_emitted: int = 0) -> Request:
    request = make_request("r", range(length), num_emitted=num_emitted)
    return replace(request, sampling=replace(request.sampling, num_prompt_logprobs=2))


def first_step(walk: Walk, request: Request) -> ev.RunStep:
    return only(walk.grant(walk.request(request)), ev.RunStep)


def with_cached_prompt() -> Walk:
    """Returns a walk whose pool has the cached blocks of a prompt of ten tokens."""
    walk = Walk(home=None, budget=16)
    walk.commit("earlier", 10)
    walk.accept("earlier")
    assert walk.state.pool.num_cached == 2
    return walk


def test_neither_cached_nor_stored_blocks_are_used() -> None:
    walk = with_cached_prompt()
    actions = walk.request(scored(10), sources=[(HOME, 0, 2)])
    assert ev.LoadPrefix not in kinds(actions)
    step = only(walk.grant(actions), ev.RunStep)
    assert spans([step]) == [("r", 0, 10)]
    report = only(walk.done(step), ev.SendFirstToken).report
    assert is_whole(report.prompt_logprobs, 10)
    assert report.cached_tokens == 0


def test_continued_request_computes_no_scores_again() -> None:
    walk = with_cached_prompt()
    step = first_step(walk, scored(10, num_emitted=2))
    assert step.plans[0].slice.start == 2 * BLOCK_SIZE
    assert step.plans[0].slice.scores is None
    assert only(walk.done(step), ev.SendFirstToken).report.prompt_logprobs is None


def test_a_step_holds_a_bounded_number_of_scored_tokens() -> None:
    walk = Walk(home=None, budget=4 * MAX_SCORED_TOKENS, num_blocks=400, prepare_ahead=4)
    length = MAX_SCORED_TOKENS + 10
    step = first_step(walk, scored(length))
    again = only(walk.done(step), ev.RunStep)
    assert spans([step, again]) == [("r", 0, MAX_SCORED_TOKENS), ("r", MAX_SCORED_TOKENS, length)]
    assert is_whole(only(walk.done(again), ev.SendFirstToken).report.prompt_logprobs, length)


def test_corrupt_blocks_are_recomputed_without_scoring_again() -> None:
    walk = Walk(home=None, budget=16)
    walk.done(first_step(walk, scored(10)))
    only(walk.written(), ev.CommitHandoff)
    again = only(walk.corrupt(1), ev.RunStep)
    assert again.plans[0].slice.scores is None
    assert ev.SendFirstToken not in kinds(walk.done(again))
    walk.written()
    walk.accept()
    walk.assert_drained()


def test_the_last_stage_of_a_pipeline_scores_for_its_leader() -> None:
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
        assert is_whole(plan.slice.scores.result(), min(plan.slice.end + 1, 10))
        if back[0] is not None:
            break
        step = only(walk.done(step), ev.RunStep)
    middle = done_to_wire(there, [None], [()], is_last=False)
    assert not middle.slices[0].HasField("prompt_logprobs")


def test_chunks_that_were_computed_before_the_grant_are_sent_with_the_next() -> None:
    walk = Walk(computes_before_grant=True)
    waiting = walk.submit("a", 20)
    walk.grant(walk.submit("b", 6, first=50, rank=-1.0))
    overtaking = only(walk.done(only(waiting, ev.RunStep)), ev.RunStep)
    walk.grant(waiting)
    [plan] = only(walk.done(overtaking), ev.RunStep).plans
    assert (plan.slice.request_id, plan.slice.start, plan.send_from) == ("a", 8, 0)


def test_a_prompt_without_a_landing_shares_no_step() -> None:
    walk = Walk(computes_before_grant=True)
    step = only(walk.submit("a", 10), ev.RunStep)
    walk.grant(walk.submit("b", 2, first=50))
    walk.submit("c", 10, first=90)
    [step] = all_of(walk.done(step), ev.RunStep)
    assert spans([step]) == [("b", 0, 2)]
    walk.cancel("a")
    assert spans(walk.done(step)) == [("c", 0, 8)]
