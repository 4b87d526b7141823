"""Events in, actions out: requests that are cancelled, or come twice, in each phase of the automaton."""

from __future__ import annotations

import pytest

from prefill_worker import actions as act
from prefill_worker import events as ev
from protocol.errors import PeerLost
from protocol.ids import RequestId
from tests.prefill_worker.builders import (
    HOME,
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


def test_cancel_while_queued_frees_at_once() -> None:
    state = make_state(num_blocks=4)
    run_to_first_step(state, "a", num_tokens=16)
    state.handle(submitted(make_request("b", range(8))), 1.0)
    fail = only(state.handle(ev.CancelRequested(request_id=RequestId("b")), 2.0), act.Fail)
    assert (fail.request_id, fail.error.code) == ("b", "cancelled")
    assert state.counters["cancelled_queued"] == 1
    state.validate()


def test_cancel_while_reserving_withdraws_and_releases_whatever_the_answer() -> None:
    state = make_state()
    reserve = only(state.handle(submitted(make_request("r", range(6))), 0.0), act.ReserveLanding)
    actions = state.handle(ev.CancelRequested(request_id=RequestId("r")), 1.0)
    assert kinds(actions) == [act.Fail, act.WithdrawReservation]
    assert kinds(state.handle(granted(reserve), 2.0)) == [act.ReleaseLanding]
    assert_drained(state)


def test_cancel_while_loading_waits_for_the_load_to_end() -> None:
    state = make_state(home=None)
    actions = state.handle(submitted(make_request("r", range(8)), sources=[(HOME, 0, 1)]), 0.0)
    state.handle(granted(only(actions, act.ReserveLanding)), 0.5)
    state.handle(ev.CancelRequested(request_id=RequestId("r")), 1.0)
    assert state.num_held_blocks == 2
    actions = state.handle(ev.PrefixLoaded(request_id=RequestId("r"), checksums=(5,)), 2.0)
    assert kinds(actions) == [act.ReleaseLanding]
    assert_drained(state)


def test_cancel_while_running_takes_effect_at_the_step_boundary() -> None:
    state = make_state(home=None, budget=4)
    step = run_to_first_step(state, num_tokens=10)
    state.handle(ev.CancelRequested(request_id=RequestId("r")), 1.5)
    assert state.handle(step_done(step), 2.0) == []
    actions = state.handle(ev.WritesDone(request_id=RequestId("r")), 2.5)
    assert kinds(actions) == [act.ReleaseLanding]
    assert state.counters["cancelled_running"] == 1
    assert_drained(state)


def test_cancel_while_sending_waits_for_the_writes() -> None:
    state = make_state(home=None)
    state.handle(step_done(run_to_first_step(state)), 2.0)
    state.handle(ev.CancelRequested(request_id=RequestId("r")), 2.5)
    assert state.num_held_blocks == 2
    failed = ev.WritesFailed(request_id=RequestId("r"), error=PeerLost("gone"))
    assert kinds(state.handle(failed, 3.0)) == [act.ReleaseLanding]
    assert_drained(state)


@pytest.mark.parametrize(
    "answer",
    [
        ev.HandoffAccepted(request_id=RequestId("r")),
        ev.HandoffCorrupt(request_id=RequestId("r"), indexes=(0,)),
        ev.HandoffFailed(request_id=RequestId("r"), error=PeerLost("gone")),
    ],
)
def test_cancel_while_committing_waits_for_the_answer(answer: ev.Event) -> None:
    state = make_state(home=None)
    run_to_commit(state)
    state.handle(ev.CancelRequested(request_id=RequestId("r")), 3.5)
    released = [] if isinstance(answer, ev.HandoffAccepted) else [act.ReleaseLanding]
    assert kinds(state.handle(answer, 4.0)) == released
    assert_drained(state)


def test_a_cancellation_that_overtakes_its_request_stops_it_within_a_minute() -> None:
    state = make_state()
    state.handle(ev.CancelRequested(request_id=RequestId("r")), 0.0)
    fail = only(state.handle(submitted(make_request("r", range(6))), 59.0), act.Fail)
    assert fail.error.code == "cancelled"
    state.handle(ev.CancelRequested(request_id=RequestId("s")), 100.0)
    actions = state.handle(submitted(make_request("s", range(6))), 161.0)
    assert kinds(actions) == [act.ReserveLanding]
    state.validate()


def test_a_late_cancellation_of_an_ended_request_does_not_stop_its_next_attempt() -> None:
    state = make_state(home=None)
    run_to_commit(state)
    state.handle(ev.HandoffAccepted(request_id=RequestId("r")), 4.0)
    state.handle(ev.CancelRequested(request_id=RequestId("r")), 5.0)
    actions = state.handle(submitted(make_request("r", range(8))), 6.0)
    assert kinds(actions) == [act.ReserveLanding]
    state.validate()


def test_a_request_that_comes_back_before_its_earlier_attempt_closed_waits_for_that() -> None:
    state = make_state(home=None)
    step = run_to_first_step(state)
    state.handle(ev.CancelRequested(request_id=RequestId("r")), 1.0)
    assert state.handle(submitted(make_request("r", range(8))), 2.0) == []
    state.handle(step_done(step), 3.0)
    actions = state.handle(ev.WritesDone(request_id=RequestId("r")), 4.0)
    assert kinds(actions) == [act.ReleaseLanding, act.ReserveLanding]
    assert only(actions, act.ReserveLanding).lease_id == "lease-2"
    state.validate()


def test_a_repeated_submission_changes_nothing() -> None:
    state = make_state()
    request = make_request("r", range(6))
    state.handle(submitted(request), 0.0)
    assert state.handle(submitted(request), 0.1) == []
    assert state.num_waiting == 1
    state.validate()
