"""Events in, actions out: the prefill worker's automaton when something fails, is corrupt or is lost."""

from __future__ import annotations

import pytest

from prefill_worker import actions as act
from prefill_worker import events as ev
from protocol.errors import Cancelled, Incompatible, MoonserveError, PeerLost, StaleLease
from protocol.ids import GatewayId, LeaseId, RequestId
from tests.prefill_worker.builders import (
    granted,
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


@pytest.mark.parametrize(
    ("error", "code"), [(Incompatible("other weights"), "peer"), (PeerLost("gone"), "peer_lost")]
)
def test_a_refused_landing_fails_the_request_for_another_placement(
    error: MoonserveError, code: str
) -> None:
    state = make_state()
    reserve = only(state.handle(submitted(make_request("r", range(6))), 0.0), act.ReserveLanding)
    actions = state.handle(ev.LandingRefused(request_id=RequestId("r"), error=error), 1.0)
    fail = only(actions, act.Fail)
    assert (fail.error.code, fail.error.retryable) == (code, True)
    assert only(actions, act.ReleaseLanding).lease_id == reserve.lease_id
    assert_drained(state)


def test_a_cancellation_that_the_decode_worker_heard_first_is_one_here_too() -> None:
    """Its reservation is refused then; that nobody wants it any more is no failure."""
    state = make_state()
    state.handle(submitted(make_request("r", range(6))), 0.0)
    gone = ev.LandingRefused(request_id=RequestId("r"), error=Cancelled("the client left"))
    actions = state.handle(gone, 1.0)
    assert act.Fail not in kinds(actions)
    assert state.counters["cancelled_reserving"] == 1
    state.handle(ev.CancelRequested(request_id=RequestId("r")), 2.0)
    assert_drained(state)


def test_a_failed_write_fails_the_request_and_keeps_its_blocks_until_the_others_end() -> None:
    state = make_state(budget=6)
    step = run_to_first_step(state, num_tokens=10)
    step = only(state.handle(step_done(step), 2.0), act.RunStep)
    failed = ev.WritesFailed(request_id=RequestId("r"), error=PeerLost("gone"))
    assert only(state.handle(failed, 3.0), act.Fail).error.retryable
    assert state.num_held_blocks == 3
    state.handle(step_done(step), 4.0)
    assert state.num_held_blocks == 3
    actions = state.handle(ev.WritesDone(request_id=RequestId("r")), 5.0)
    assert kinds(actions) == [act.ReleaseLanding]
    assert_drained(state)


def test_a_lost_lease_fails_the_request() -> None:
    state = make_state()
    step = run_to_first_step(state)
    lost = ev.LandingLost(
        request_id=RequestId("r"), lease_id=LeaseId("lease-1"), error=StaleLease("expired")
    )
    assert only(state.handle(lost, 1.5), act.Fail).error.retryable
    state.handle(step_done(step), 2.0)
    state.handle(ev.WritesDone(request_id=RequestId("r")), 3.0)
    assert_drained(state)


def test_corrupt_blocks_are_dropped_recomputed_and_sent_again_without_a_second_first_token() -> (
    None
):
    state = make_state(budget=16, home=None)
    run_to_commit(state, num_tokens=10)
    actions = state.handle(ev.HandoffCorrupt(request_id=RequestId("r"), indexes=(1,)), 4.0)
    plan = only(actions, act.RunStep).plans[0]
    assert (plan.slice.start, plan.slice.end, plan.send_from) == (4, 10, 4)
    assert not plan.slice.samples
    assert state.counters["integrity_failures"] == 1
    assert state.counters["recomputed_blocks"] == 2

    actions = state.handle(step_done(only(actions, act.RunStep)), 5.0)
    assert actions == []
    commit = only(state.handle(ev.WritesDone(request_id=RequestId("r")), 6.0), act.CommitHandoff)
    assert commit.checksums == (1000, 1001, 1002)
    state.handle(ev.HandoffAccepted(request_id=RequestId("r")), 7.0)
    assert_drained(state)


def test_a_corrupt_cached_block_is_never_found_again() -> None:
    state = make_state(budget=16, home=None)
    run_to_commit(state, "a", num_tokens=10)
    state.handle(ev.HandoffAccepted(request_id=RequestId("a")), 4.0)
    reserve = only(state.handle(submitted(make_request("b", range(10))), 5.0), act.ReserveLanding)
    step = only(state.handle(granted(reserve), 5.0), act.RunStep)
    state.handle(step_done(step), 6.0)
    state.handle(ev.WritesDone(request_id=RequestId("b")), 6.0)
    state.handle(ev.WritesDone(request_id=RequestId("b")), 6.0)
    actions = state.handle(ev.HandoffCorrupt(request_id=RequestId("b"), indexes=(0,)), 7.0)
    assert only(actions, act.RunStep).plans[0].slice.start == 0
    assert state.num_cached_blocks == 0
    state.validate()


def test_three_corrupt_handoffs_fail_the_request() -> None:
    state = make_state(home=None)
    run_to_commit(state)
    corrupt = ev.HandoffCorrupt(request_id=RequestId("r"), indexes=(0,))
    for _ in range(2):
        step = only(state.handle(corrupt, 4.0), act.RunStep)
        state.handle(step_done(step), 5.0)
        state.handle(ev.WritesDone(request_id=RequestId("r")), 6.0)
    actions = state.handle(corrupt, 7.0)
    assert only(actions, act.Fail).error.code == "integrity"
    assert kinds(actions) == [act.Fail, act.ReleaseLanding]
    assert_drained(state)


def test_a_corrupt_handoff_after_the_time_limit_fails_the_request() -> None:
    """A Tick leaves a commit under way alone; its answer looks at the time."""
    state = make_state(home=None)
    run_to_commit(state)
    assert state.handle(ev.Tick(), 600.0) == []
    corrupt = ev.HandoffCorrupt(request_id=RequestId("r"), indexes=(0,))
    actions = state.handle(corrupt, 601.0)
    assert only(actions, act.Fail).error.code == "deadline"
    assert_drained(state)


def test_a_failed_commit_fails_the_request_for_another_placement() -> None:
    state = make_state(home=None)
    run_to_commit(state)
    failed = ev.HandoffFailed(request_id=RequestId("r"), error=StaleLease("expired"))
    assert only(state.handle(failed, 4.0), act.Fail).error.retryable
    assert_drained(state)


def test_a_request_over_its_time_limit_fails() -> None:
    state = make_state()
    step = run_to_first_step(state)
    assert state.next_deadline() == 600.0
    assert state.handle(ev.Tick(), 599.0) == []
    assert only(state.handle(ev.Tick(), 600.0), act.Fail).error.code == "deadline"
    state.handle(step_done(step), 601.0)
    state.handle(ev.WritesDone(request_id=RequestId("r")), 601.0)
    assert state.next_deadline() is None
    assert_drained(state)


def test_a_lost_gateway_ends_its_requests_and_no_others() -> None:
    state = make_state()
    step = run_to_first_step(state, "mine")
    state.handle(submitted(make_request("other", range(8), gateway="gateway-1")), 1.0)
    assert state.handle(ev.GatewayLost(gateway_id=GatewayId("gateway-0")), 2.0) == []
    state.handle(step_done(step), 3.0)
    state.handle(ev.WritesDone(request_id=RequestId("mine")), 3.0)
    assert (state.num_waiting, state.num_running) == (1, 0)
    state.validate()


def test_a_failed_step_fails_its_members_and_the_next_one_runs() -> None:
    state = make_state()
    run_to_first_step(state, "a", num_tokens=8)
    reserve = only(state.handle(submitted(make_request("b", range(8))), 1.0), act.ReserveLanding)
    state.handle(granted(reserve), 1.0)
    actions = state.handle(ev.StepFailed(error=MoonserveError("boom")), 2.0)
    assert kinds(actions) == [act.Fail, act.RunStep]
    state.validate()
