"""Prefill worker's state machine with failures, corrupt blocks, cancellations and repeated requests in each phase."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from moonserve.prefill_worker.decisions import events as ev
from moonserve.protocol.errors import Cancelled, Incompatible, PeerLost, StaleLease
from moonserve.protocol.request import GatewayId, LeaseId, RequestId
from moonserve.worker.events import Action, Event
from tests.prefill_worker.builders import HOME, LANDING, Walk, kinds, only, spans

R = RequestId("r")
LOST = PeerLost("gone")


@pytest.mark.parametrize(
    ("reach", "event", "code"),
    [
        (Walk.submit, ev.LandingRefused(request_id=R, error=Incompatible("weights")), "peer"),
        (Walk.submit, ev.LandingRefused(request_id=R, error=LOST), "peer_lost"),
        (Walk.commit, ev.HandoffFailed(request_id=R, error=StaleLease("expired")), "stale"),
        (Walk.commit, ev.HandoffFailed(request_id=R, error=LOST), "peer_lost"),
    ],
)
def test_refusal_by_the_decode_worker_fails_the_request_as_retryable(
    reach: Callable[[Walk], object], event: Event, code: str
) -> None:
    walk = Walk(home=None)
    reach(walk)
    actions = walk.handle(event)
    failed = only(actions, ev.Fail).error
    assert (failed.code, failed.retryable) == (code, True)
    assert only(actions, ev.ReleaseLanding).lease_id == "lease-1"
    walk.assert_drained()


def test_a_cancellation_that_the_decode_worker_heard_first_is_one_here_too() -> None:
    """The decode worker refuses the reservation with Cancelled, which is not reported as a failure."""
    walk = Walk()
    walk.submit()
    gone = ev.LandingRefused(request_id=R, error=Cancelled("the client left"))
    assert ev.Fail not in kinds(walk.handle(gone))
    assert walk.state.counters["cancelled_reserving"] == 1
    walk.cancel()
    walk.assert_drained()


def test_a_failed_write_fails_the_request_and_keeps_its_blocks_until_the_others_end() -> None:
    walk = Walk(budget=6)
    step = only(walk.done(walk.start(num_tokens=10)), ev.RunStep)
    failed = walk.handle(ev.WritesFailed(request_id=R, error=LOST))
    assert only(failed, ev.Fail).error.retryable
    walk.done(step)
    assert walk.state.num_held_blocks == 3
    assert kinds(walk.written()) == [ev.ReleaseLanding]
    walk.assert_drained()


def test_a_lost_lease_fails_the_request() -> None:
    walk = Walk()
    step = walk.start()
    lost = ev.LandingLost(request_id=R, lease_id=LeaseId("lease-1"), error=StaleLease("expired"))
    assert only(walk.handle(lost), ev.Fail).error.retryable
    walk.done(step)
    walk.written()
    walk.assert_drained()


def test_corrupt_blocks_are_dropped_recomputed_and_sent_again_without_a_second_first_token() -> None:
    walk = Walk(budget=16, home=None)
    walk.commit(num_tokens=10)
    step = only(walk.corrupt(1), ev.RunStep)
    [plan] = step.plans
    assert (plan.slice.start, plan.slice.end, plan.send_from) == (4, 10, 4)
    assert not plan.slice.samples
    assert walk.state.counters["integrity_failures"] == 1
    assert walk.state.counters["recomputed_blocks"] == 2
    assert walk.done(step) == []
    assert only(walk.written(), ev.CommitHandoff).checksums == (1000, 1001, 1002)
    walk.accept()
    walk.assert_drained()


def test_a_corrupt_cached_block_is_never_found_again() -> None:
    walk = Walk(budget=16, home=None)
    walk.commit("a", 10)
    walk.accept("a")
    walk.done(walk.start("b", 10))
    walk.written("b")
    walk.written("b")
    assert spans(walk.corrupt(0, name="b")) == [("b", 0, 10)]
    assert walk.state.pool.num_cached == 0


def test_three_corrupt_handoffs_fail_the_request() -> None:
    walk = Walk(home=None)
    walk.commit()
    for _ in range(2):
        walk.done(only(walk.corrupt(0), ev.RunStep))
        walk.written()
    actions = walk.corrupt(0)
    assert only(actions, ev.Fail).error.code == "integrity"
    assert kinds(actions) == [ev.Fail, ev.ReleaseLanding]
    walk.assert_drained()


def test_a_request_over_its_time_limit_fails_but_for_a_commit_under_way() -> None:
    """The deadline of a request with a commit in flight is checked when the answer arrives."""
    walk = Walk()
    step = walk.start()
    assert walk.state.wake_at == 600.0
    assert walk.handle(ev.Tick(), 599.0) == []
    assert only(walk.handle(ev.Tick(), 600.0), ev.Fail).error.code == "deadline"
    walk.done(step)
    walk.written()
    assert walk.state.wake_at is None
    walk.assert_drained()
    walk = Walk()
    walk.commit()
    assert walk.handle(ev.Tick(), 600.0) == []
    assert only(walk.corrupt(0, at=601.0), ev.Fail).error.code == "deadline"


def test_a_lost_gateway_ends_its_requests_and_no_others() -> None:
    walk = Walk()
    step = walk.start("mine")
    walk.submit("other", 8, gateway="gateway-1")
    assert walk.handle(ev.GatewayLost(gateway_id=GatewayId("gateway-0"))) == []
    walk.done(step)
    walk.written("mine")
    assert (walk.state.num_waiting, walk.state.num_running) == (1, 0)


def queued(walk: Walk) -> None:
    walk.start("a", 64)
    walk.submit()


def loading(walk: Walk) -> None:
    walk.grant(walk.submit("r", 8, sources=[(HOME, 0, 1)]))


GRANT = ev.LandingGranted(request_id=R, landing=replace(LANDING, lease_id=LeaseId("lease-1"), block_ids=(100, 101)))
CORRUPT = ev.HandoffCorrupt(request_id=R, indexes=(0,))


@pytest.mark.parametrize(
    ("phase", "reach", "ends", "told", "released"),
    [
        ("queued", queued, [], [ev.Fail], []),
        *(
            ("reserving", Walk.submit, [answer], [ev.Fail, ev.WithdrawReservation], [ev.ReleaseLanding])
            for answer in (ev.LandingRefused(request_id=R, error=LOST), GRANT)
        ),
        ("loading", loading, [ev.PrefixLoaded(request_id=R, checksums=(5,))], [ev.Fail], [ev.ReleaseLanding]),
        (
            "running",
            lambda walk: walk.start(num_tokens=10),
            [ev.StepFailed(error=LOST), ev.WritesDone(request_id=R)],
            [ev.Fail],
            [ev.ReleaseLanding],
        ),
        (
            "sending",
            lambda walk: walk.done(walk.start()),
            [ev.WritesFailed(request_id=R, error=LOST)],
            [ev.Fail],
            [ev.ReleaseLanding],
        ),
        ("committing", Walk.commit, [ev.HandoffAccepted(request_id=R)], [ev.Fail], []),
        *(
            ("committing", Walk.commit, [answer], [ev.Fail], [ev.ReleaseLanding])
            for answer in (CORRUPT, ev.HandoffFailed(request_id=R, error=LOST))
        ),
    ],
)
def test_a_cancelled_request_lets_go_when_the_last_operation_has_ended(
    phase: str,
    reach: Callable[[Walk], object],
    ends: list[Event],
    told: list[type[Action]],
    released: list[type[Action]],
) -> None:
    """No further step runs, whatever the results of the operations in flight."""
    walk = Walk(home=None, num_blocks=16, budget=16)
    reach(walk)
    assert kinds(walk.cancel()) == told
    assert walk.state.counters[f"cancelled_{phase}"] == 1
    for event in ends:
        assert walk.state.num_held_blocks >= 2
        actions = walk.handle(event)
    if ends:
        assert kinds(actions) == released
        walk.assert_drained()


def test_a_cancellation_that_overtakes_its_request_stops_it_within_a_minute() -> None:
    walk = Walk()
    walk.cancel("r", at=0.0)
    assert only(walk.submit("r", at=59.0), ev.Fail).error.code == "cancelled"
    walk.cancel("s", at=100.0)
    assert kinds(walk.submit("s", at=161.0)) == [ev.ReserveLanding]


def test_a_late_cancellation_of_an_ended_request_does_not_stop_its_next_attempt() -> None:
    walk = Walk(home=None)
    walk.commit()
    walk.accept()
    walk.cancel()
    assert kinds(walk.submit("r", 8)) == [ev.ReserveLanding]


def test_a_request_that_comes_back_before_its_earlier_attempt_closed_waits_for_that() -> None:
    walk = Walk(home=None)
    step = walk.start()
    walk.cancel()
    assert walk.submit("r", 8) == []
    walk.done(step)
    actions = walk.written()
    assert kinds(actions) == [ev.ReleaseLanding, ev.ReserveLanding]
    assert only(actions, ev.ReserveLanding).lease_id == "lease-2"


def test_a_repeated_submission_changes_nothing() -> None:
    walk = Walk()
    walk.submit()
    assert walk.submit() == []
    assert walk.state.num_waiting == 1
