"""Events in, actions out: the prefill worker's automaton, from a request's arrival to its end, when all goes well."""

from __future__ import annotations

import pytest

from prefill_worker import actions as act
from prefill_worker import events as ev
from prefill_worker.sequence import IllegalTransition, Phase, Sequence
from protocol.errors import PeerLost
from protocol.ids import LeaseId, RequestId
from protocol.profile import PrefillProfile
from protocol.request import FinishReason
from tests.prefill_worker.builders import (
    HOME,
    endpoint,
    granted,
    make_placement,
    make_request,
    make_state,
    step_done,
    submitted,
)
from tests.prefill_worker.walks import (
    assert_drained,
    kinds,
    only,
    run_to_commit,
    run_to_first_step,
)


def test_a_request_goes_through_all_phases_and_leaves_no_block_held() -> None:
    state = make_state(home=None)
    request = make_request("r", range(6))
    reserve = only(state.handle(submitted(request), 0.0), act.ReserveLanding)
    assert (reserve.num_tokens, reserve.block_keys) == (6, request.block_keys)

    actions = state.handle(granted(reserve), 1.0)
    assert kinds(actions) == [act.RunStep]
    plan = only(actions, act.RunStep).plans[0]
    assert (plan.slice.start, plan.slice.end, plan.send_from) == (0, 6, 0)
    assert plan.complete == (0, 1)
    assert plan.slice.samples

    first = only(state.handle(step_done(act.RunStep(plans=(plan,))), 3.0), act.SendFirstToken)
    assert (first.token.index, first.token.token_id, first.token.finish_reason) == (0, 42, None)
    report = first.report
    assert (report.queue_s, report.load_s, report.compute_s) == (0.0, 1.0, 2.0)

    commit = only(state.handle(ev.WritesDone(request_id=RequestId("r")), 4.0), act.CommitHandoff)
    assert commit.checksums == (1000, 1001)
    assert commit.timeout_s == 596.0
    assert state.handle(ev.HandoffAccepted(request_id=RequestId("r")), 5.0) == []
    assert state.num_cached_blocks == 1
    assert_drained(state)


def test_a_long_prompt_runs_in_chunks_that_send_only_their_own_tokens() -> None:
    state = make_state(budget=6)
    step = run_to_first_step(state, num_tokens=10)
    plan = step.plans[0]
    assert (plan.slice.start, plan.slice.end, plan.complete, plan.slice.samples) == (
        0,
        6,
        (0,),
        False,
    )
    plan = only(state.handle(step_done(step), 2.0), act.RunStep).plans[0]
    assert (plan.slice.start, plan.slice.end, plan.send_from) == (6, 10, 6)
    assert plan.complete == (1, 2)
    assert plan.slice.samples
    state.validate()


@pytest.mark.parametrize(
    ("lengths", "in_step"),
    [
        ([6, 2], ["b", "c"]),  # 6 tokens fill six of the step's eight, and two more delay little
        (
            [6, 3],
            ["b"],
        ),  # the third would be left over: a step that a prompt ends with is not filled up
        (
            [2, 4, 2],
            ["b", "c", "d"],
        ),  # 4 · c1 for one that ends, 2 · c1 for two: at most c0 for each that waits
        (
            [2, 6],
            ["b"],
        ),  # 6 · c1 is more than the 5 · c1 that one step costs before its first token
    ],
)
def test_short_prompts_share_a_step_where_that_is_less_waiting_in_all(
    lengths: list[int], in_step: list[str]
) -> None:
    """c0 is worth five tokens here."""
    profile = PrefillProfile(c0=0.005, c1=0.001, c2=0.0)
    state = make_state(budget=8, num_blocks=64, profile=profile)
    first = run_to_first_step(state, "a", num_tokens=4)
    for name, length in zip("bcd", lengths, strict=False):
        request = make_request(name, range(50, 50 + length))
        reserve = only(state.handle(submitted(request), 0.0), act.ReserveLanding)
        assert state.handle(granted(reserve), 1.0) == []  # one step at a time
    plans = only(state.handle(step_done(first), 2.0), act.RunStep).plans
    assert [p.slice.request_id for p in plans] == in_step
    assert all(p.slice.samples for p in plans)
    state.validate()


def test_a_prompt_reports_its_share_of_a_shared_step_and_the_rest_as_queueing() -> None:
    """The three times add up to the time since the submission; those of one step add up to the step."""
    profile = PrefillProfile(c0=0.005, c1=0.001, c2=0.0)
    state = make_state(budget=8, num_blocks=64, profile=profile)
    first = run_to_first_step(state, "a", num_tokens=4)
    for name, length in (("b", 2), ("c", 3)):
        request = make_request(name, range(50, 50 + length))
        reserve = only(state.handle(submitted(request), 0.0), act.ReserveLanding)
        state.handle(granted(reserve), 1.0)
    step = only(state.handle(step_done(first), 2.0), act.RunStep)
    actions = state.handle(step_done(step), 5.0)
    reports = [action.report for action in actions if isinstance(action, act.SendFirstToken)]
    assert [report.compute_s for report in reports] == [
        pytest.approx(3.0 * own / 15) for own in (7, 8)
    ]
    for report in reports:
        assert report.queue_s + report.load_s + report.compute_s == pytest.approx(5.0)


def test_reserving_and_loading_of_the_next_request_overlap_the_running_step() -> None:
    state = make_state(num_blocks=32)
    run_to_first_step(state, "a")
    request = make_request("b", range(50, 62))
    actions = state.handle(submitted(request, sources=[(HOME, 0, 2)]), 1.0)
    assert kinds(actions) == [act.ReserveLanding, act.LoadPrefix]
    state.validate()


def test_only_so_many_requests_are_prepared_ahead() -> None:
    state = make_state(num_blocks=64, lookahead=2, budget=8)
    run_to_first_step(state, "a")
    prepared = [
        bool(state.handle(submitted(make_request(name, range(i, i + 8))), 1.0))
        for i, name in enumerate(["b", "c", "d"], start=50)
    ]
    assert prepared == [True, True, False]
    assert (state.num_waiting, state.num_running) == (3, 1)
    state.validate()


def test_prefix_blocks_come_from_the_stores_that_the_placement_names() -> None:
    state = make_state()
    far = endpoint("store-1")
    request = make_request("r", range(16))  # three usable blocks: the last token is computed
    actions = state.handle(submitted(request, sources=[(HOME, 0, 2), (far, 2, 2)]), 0.0)
    load = only(actions, act.LoadPrefix)
    assert [(part.store, len(part.keys)) for part in load.parts] == [(HOME, 2), (far, 1)]

    state.handle(granted(only(actions, act.ReserveLanding)), 0.5)
    actions = state.handle(ev.PrefixLoaded(request_id=RequestId("r"), checksums=(5, 6)), 1.0)
    send, step = only(actions, act.SendBlocks), only(actions, act.RunStep)
    assert send.pairs == tuple(zip(load.parts[0].blocks, (100, 101), strict=True))
    assert (step.plans[0].slice.start, step.plans[0].send_from) == (8, 8)
    assert state.counters["store_hit_blocks"] == 2

    first = only(state.handle(step_done(step), 2.0), act.SendFirstToken)
    assert first.report.cached_tokens == 8
    assert not state.handle(ev.WritesDone(request_id=RequestId("r")), 3.0)
    commit = only(state.handle(ev.WritesDone(request_id=RequestId("r")), 3.0), act.CommitHandoff)
    assert commit.checksums == (5, 6, 1002, 1003)
    state.validate()


def test_a_failed_load_means_computing_and_not_failing() -> None:
    state = make_state()
    actions = state.handle(submitted(make_request("r", range(8)), sources=[(HOME, 0, 1)]), 0.0)
    state.handle(granted(only(actions, act.ReserveLanding)), 0.5)
    failed = ev.PrefixLoadFailed(request_id=RequestId("r"), error=PeerLost("gone"))
    step = only(state.handle(failed, 1.0), act.RunStep)
    assert step.plans[0].slice.start == 0
    state.validate()


def test_a_second_request_reuses_the_device_cache_and_keeps_the_writers_checksums() -> None:
    state = make_state(home=None)
    run_to_commit(state, "a", num_tokens=8)
    state.handle(ev.HandoffAccepted(request_id=RequestId("a")), 4.0)
    reserve = only(state.handle(submitted(make_request("b", range(8))), 5.0), act.ReserveLanding)
    actions = state.handle(granted(reserve), 6.0)
    assert kinds(actions) == [act.SendBlocks, act.RunStep]
    step = only(actions, act.RunStep)
    assert step.plans[0].slice.start == 4
    state.handle(step_done(step), 7.0)
    state.handle(ev.WritesDone(request_id=RequestId("b")), 8.0)
    commit = only(state.handle(ev.WritesDone(request_id=RequestId("b")), 8.0), act.CommitHandoff)
    assert commit.checksums == (1000, 1001)
    state.validate()


def test_blocks_computed_while_a_request_waited_are_found_before_it_runs() -> None:
    state = make_state(budget=12)
    step = run_to_first_step(state, "a", num_tokens=9)
    reserve = only(state.handle(submitted(make_request("b", range(9))), 1.0), act.ReserveLanding)
    state.handle(granted(reserve), 1.0)
    actions = state.handle(step_done(step), 2.0)
    plan = only(actions, act.RunStep).plans[0]
    assert (plan.slice.request_id, plan.slice.start) == ("b", 8)
    assert only(actions, act.SendBlocks).pairs == ((0, 100), (1, 101))
    state.validate()


def test_blocks_that_the_target_already_has_are_not_sent() -> None:
    state = make_state(budget=16)
    step = run_to_first_step(state, num_tokens=10, num_cached=1)
    assert (step.plans[0].slice.start, step.plans[0].send_from) == (0, 4)
    state.handle(step_done(step), 2.0)
    commit = only(state.handle(ev.WritesDone(request_id=RequestId("r")), 3.0), act.CommitHandoff)
    assert commit.checksums == (1001, 1002)
    state.validate()


def test_when_the_target_has_everything_nothing_is_sent_and_the_commit_follows_at_once() -> None:
    state = make_state()
    step = run_to_first_step(state, num_tokens=8, num_cached=2)
    assert step.plans[0].landing is None
    actions = state.handle(step_done(step), 2.0)
    assert kinds(actions) == [act.SendFirstToken, act.CommitHandoff]
    state.validate()


def test_a_request_for_one_token_never_reserves() -> None:
    state = make_state(home=None)
    step = only(
        state.handle(submitted(make_request("r", range(6), max_tokens=1)), 0.0), act.RunStep
    )
    assert step.plans[0].landing is None
    actions = state.handle(step_done(step), 1.0)
    assert kinds(actions) == [act.SendFirstToken]
    assert only(actions, act.SendFirstToken).token.finish_reason is FinishReason.LENGTH
    assert_drained(state)


def test_a_request_that_stops_with_its_first_token_gives_its_landing_back_after_the_writes() -> (
    None
):
    state = make_state(home=None)
    request = make_request("r", range(6), stop_token_ids=frozenset({42}))
    reserve = only(state.handle(submitted(request), 0.0), act.ReserveLanding)
    step = only(state.handle(granted(reserve), 1.0), act.RunStep)
    first = only(state.handle(step_done(step), 2.0), act.SendFirstToken)
    assert first.token.finish_reason is FinishReason.STOP
    assert state.num_held_blocks == 2  # still being read
    actions = state.handle(ev.WritesDone(request_id=RequestId("r")), 3.0)
    assert only(actions, act.ReleaseLanding).lease_id == reserve.lease_id
    assert_drained(state)


def test_a_continued_request_numbers_its_token_after_those_already_sent() -> None:
    state = make_state(home=None, budget=16)
    request = make_request("r", range(9), num_emitted=3, max_tokens=4)
    step = only(state.handle(submitted(request), 0.0), act.RunStep)
    first = only(state.handle(step_done(step), 1.0), act.SendFirstToken)
    assert (first.token.index, first.token.finish_reason) == (3, FinishReason.LENGTH)
    assert_drained(state)


@pytest.mark.parametrize(("num_tokens", "word"), [(80, "blocks"), (101, "tokens")])
def test_a_prompt_that_can_never_fit_is_refused_clearly(num_tokens: int, word: str) -> None:
    state = make_state(num_blocks=16, max_model_len=100)
    fail = only(state.handle(submitted(make_request("r", range(num_tokens))), 0.0), act.Fail)
    assert fail.error.code == "invalid_request"
    assert word in fail.error.message
    assert_drained(state)


def test_a_request_that_does_not_fit_now_waits_for_blocks() -> None:
    state = make_state(num_blocks=4, home=None)
    run_to_commit(state, "a", num_tokens=8)
    assert state.handle(submitted(make_request("b", range(50, 62))), 3.0) == []
    actions = state.handle(ev.HandoffAccepted(request_id=RequestId("a")), 4.0)
    assert only(actions, act.ReserveLanding).request_id == "b"
    state.validate()


def test_priority_policy_runs_the_lower_number_first() -> None:
    state = make_state(num_blocks=4, policy="priority", lookahead=1, budget=16)
    run_to_commit(state, "a", num_tokens=16)
    state.handle(submitted(make_request("late", range(8), priority=5)), 3.0)
    state.handle(submitted(make_request("soon", range(8), priority=1)), 3.0)
    actions = state.handle(ev.HandoffAccepted(request_id=RequestId("a")), 4.0)
    reserved = [a.request_id for a in actions if isinstance(a, act.ReserveLanding)]
    assert reserved == ["soon", "late"]
    state.validate()


def test_full_blocks_go_to_the_home_store_after_the_handoff_and_only_once() -> None:
    state = make_state()
    state.handle(ev.HomeStoreFound(store=HOME), 0.0)
    run_to_commit(state, num_tokens=8)
    put = only(state.handle(ev.HandoffAccepted(request_id=RequestId("r")), 4.0), act.PutBlocks)
    keys = make_request("r", range(8)).block_keys
    assert [(i.key, i.parent, i.checksum) for i in put.items] == [
        (keys[0], None, 1000),
        (keys[1], keys[0], 1001),
    ]
    assert state.num_held_blocks == 2
    state.handle(ev.PutDone(put_id=put.put_id, num_refused=0, corrupt=()), 5.0)
    assert_drained(state)

    step = only(
        state.handle(submitted(make_request("s", range(8), max_tokens=1)), 6.0), act.RunStep
    )
    assert kinds(state.handle(step_done(step), 7.0)) == [act.SendFirstToken]
    state.validate()


def test_blocks_read_from_the_home_store_are_not_put_back() -> None:
    state = make_state()
    state.handle(ev.HomeStoreFound(store=HOME), 0.0)
    request = make_request("r", range(9), max_tokens=1)
    state.handle(submitted(request, sources=[(HOME, 0, 1)]), 0.0)
    loaded = ev.PrefixLoaded(request_id=RequestId("r"), checksums=(5,))
    step = only(state.handle(loaded, 1.0), act.RunStep)
    put = only(state.handle(step_done(step), 2.0), act.PutBlocks)
    assert [item.key for item in put.items] == [request.block_keys[1]]
    state.validate()


def test_puts_are_bounded_and_what_is_too_much_is_dropped_and_counted() -> None:
    state = make_state(max_put_blocks=1, max_pending_puts=2)
    step = only(
        state.handle(submitted(make_request("r", range(8), max_tokens=1)), 0.0), act.RunStep
    )
    state.handle(step_done(step), 1.0)
    step = only(
        state.handle(submitted(make_request("s", range(50, 58), max_tokens=1)), 2.0), act.RunStep
    )
    state.handle(step_done(step), 3.0)
    assert state.counters["put_dropped_blocks"] == 2
    put = only(state.handle(ev.HomeStoreFound(store=HOME), 4.0), act.PutBlocks)
    assert len(put.items) == 1
    actions = state.handle(ev.PutFailed(put_id=put.put_id, error=PeerLost("gone")), 5.0)
    assert actions == []
    assert state.needs_home_store
    put = only(
        state.handle(ev.HomeStoreFound(store=endpoint("store-0", epoch=2)), 6.0), act.PutBlocks
    )
    state.handle(ev.PutDone(put_id=put.put_id, num_refused=0, corrupt=(put.items[0].key,)), 7.0)
    assert state.counters["integrity_failures"] == 1
    assert state.counters["put_dropped_blocks"] == 3
    assert_drained(state)


def test_an_illegal_step_raises_with_the_history_and_changes_nothing() -> None:
    request = make_request("r", range(6))
    sequence = Sequence(
        request=request,
        placement=make_placement(request),
        rank=(0, 0.0, 1),
        lease_id=LeaseId("l"),
        submitted_at=0.0,
    )
    sequence.enter(Phase.RESERVING, 1.0)
    with pytest.raises(IllegalTransition, match=r"r: reserving → committing.*reserving@1\.000"):
        sequence.enter(Phase.COMMITTING, 2.0)
    assert sequence.phase is Phase.RESERVING
    state = make_state()
    with pytest.raises(KeyError):
        state.handle(ev.WritesDone(request_id=RequestId("nobody")), 0.0)
    state.validate()
