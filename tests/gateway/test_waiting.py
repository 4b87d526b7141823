"""When a request waits for workers, whom it avoids meanwhile, and when its patience ends."""

from __future__ import annotations

import pytest

from gateway.generation.avoidance import DOUBT_S
from gateway.generation.events import (
    InstanceLost,
    Pause,
    Place,
    Placed,
    PlaceDue,
    PlaceFailed,
    ReportPhase,
    Submit,
    SubmitFailed,
    WorkerFailed,
)
from gateway.generation.state import RequestState
from protocol.errors import (
    IntegrityError,
    MoonserveError,
    NotLeader,
    NoWorker,
    Overloaded,
    PeerLost,
)
from tests.gateway.requests import arrived, of, placed, placement


@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=2.0), NoWorker("none")])
def test_the_first_placement_is_refused_at_once(state: RequestState, error: MoonserveError) -> None:
    (fail,) = state.handle(PlaceFailed(attempt=1, error=error), 0.0)
    assert fail.error is error


def test_a_new_request_waits_for_workers_that_were_there_a_moment_ago(state: RequestState) -> None:
    absent = PlaceFailed(attempt=1, error=NoWorker("none"), may_return=True)
    assert of(Pause, state.handle(absent, 0.0))
    assert of(Place, state.handle(PlaceDue(attempt=1), 0.25))
    (fail,) = state.handle(absent, 30.0)
    assert fail.error is absent.error


def test_a_crowd_is_not_waited_for(state: RequestState) -> None:
    crowded = Overloaded("full", retry_after_s=2.0)
    (fail,) = state.handle(PlaceFailed(attempt=1, error=crowded, may_return=True), 0.0)
    assert fail.error is crowded


@pytest.mark.parametrize("error", [NotLeader("not me"), PeerLost("gone")])
def test_a_new_request_waits_while_no_conductor_leads(
    state: RequestState, error: MoonserveError
) -> None:
    (pause,) = state.handle(PlaceFailed(attempt=1, error=error), 0.0)
    assert isinstance(pause, Pause)
    (place,) = state.handle(PlaceDue(attempt=1), 0.5)
    assert isinstance(place, Place)
    assert place.attempt == 1
    (fail,) = state.handle(PlaceFailed(attempt=1, error=error), 30.0)
    assert fail.error is error


@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=2.0), NoWorker("none")])
def test_a_request_with_tokens_waits_for_a_worker_to_come_back(
    decoding: RequestState, error: MoonserveError
) -> None:
    decoding.handle(InstanceLost(instance_id="d0", error=PeerLost("gone")), 3.0)
    (pause,) = decoding.handle(PlaceFailed(attempt=2, error=error), 3.0)
    assert isinstance(pause, Pause)
    (place,) = decoding.handle(PlaceDue(attempt=2), 3.5)
    assert place.excluded == {("d0", 1)}
    (fail,) = decoding.handle(PlaceFailed(attempt=2, error=error), 30.0)
    assert fail.error is error


def test_who_failed_is_still_avoided_after_a_rejected_second_attempt(state: RequestState) -> None:
    placed(state)
    failed = WorkerFailed(attempt=1, instance_id="p0", error=IntegrityError("bad bytes"))
    state.handle(failed, 2.0)
    state.handle(PlaceFailed(attempt=2, error=Overloaded("full", retry_after_s=2.0)), 2.0)
    (place,) = state.handle(PlaceDue(attempt=2), 2.25)
    assert place.excluded == {("p0", 1)}


def test_who_only_failed_gets_another_chance_when_there_is_nobody_else(state: RequestState) -> None:
    placed(state)
    failed = WorkerFailed(attempt=1, instance_id="p0", error=IntegrityError("bad bytes"))
    state.handle(failed, 2.0)
    state.handle(PlaceFailed(attempt=2, error=NoWorker("none")), 2.0)
    (place,) = state.handle(PlaceDue(attempt=2), 2.25)
    assert place.excluded == frozenset()


def test_who_broke_is_let_in_again_once_the_conductor_must_have_noticed_its_death(
    decoding: RequestState,
) -> None:
    decoding.handle(InstanceLost(instance_id="d0", error=PeerLost("gone")), 3.0)
    decoding.handle(PlaceFailed(attempt=2, error=NoWorker("none")), 3.0 + DOUBT_S)
    (place,) = decoding.handle(PlaceDue(attempt=2), 3.25 + DOUBT_S)
    assert place.excluded == frozenset()


def test_who_broke_is_let_in_again_once_it_speaks_on_a_new_connection(
    decoding: RequestState,
) -> None:
    decoding.handle(InstanceLost(instance_id="d0", error=PeerLost("gone")), 3.0)
    for opened_at, excluded in ((2.9, {("d0", 1)}), (3.1, set())):
        nobody = PlaceFailed(
            attempt=2, error=NoWorker("none"), open_since={("d0", 1): opened_at, ("d1", 1): 9.0}
        )
        decoding.handle(nobody, 3.2)
        (place,) = decoding.handle(PlaceDue(attempt=2), 3.2)
        assert place.excluded == excluded


def test_a_failed_submission_avoids_that_prefill_worker(state: RequestState) -> None:
    placed(state)
    (place,) = of(Place, state.handle(SubmitFailed(attempt=1, error=PeerLost("x")), 2.0))
    assert place.excluded == {("p0", 1)}


def test_a_lost_incarnation_is_waited_out_without_an_attempt(decoding: RequestState) -> None:
    decoding.handle(InstanceLost(instance_id="d0", error=PeerLost("gone")), 3.0)
    for _ in range(8):
        report, pause = placed(decoding, now=3.5)
        assert (report.request_id, report.phase) == ("r~2", ReportPhase.CANCELLED)
        assert isinstance(pause, Pause)
        (place,) = decoding.handle(PlaceDue(attempt=2), 3.75)
        assert (place.attempt, place.excluded) == (2, {("d0", 1)})
        decoding.handle(PlaceFailed(attempt=2, error=NoWorker("none")), 3.75)
        (place,) = decoding.handle(PlaceDue(attempt=2), 4.0)
        assert place.excluded == {("d0", 1)}
    (submit,) = placed(decoding, epoch=2, now=8.0)
    assert isinstance(submit, Submit)
    assert submit.token_ids == (7, 8, 9, 0, 1)


def test_a_placement_with_who_has_a_successor_is_given_back(state: RequestState) -> None:
    """The loss was told before the placement came, which the conductor had made before it knew."""
    stale = Placed(attempt=1, placement=placement(), replaced=frozenset({"p0"}))
    report, pause = state.handle(stale, 1.0)
    assert (report.request_id, report.phase) == ("r", ReportPhase.CANCELLED)
    assert isinstance(pause, Pause)
    (place,) = state.handle(PlaceDue(attempt=1), 1.25)
    assert (place.attempt, place.excluded) == (1, frozenset())  # its successor may have it
    (submit,) = placed(state, epoch=2)
    assert isinstance(submit, Submit)


def test_patience_with_a_lost_incarnation_ends(decoding: RequestState) -> None:
    decoding.handle(InstanceLost(instance_id="d0", error=PeerLost("gone")), 3.0)
    decoding.handle(PlaceFailed(attempt=2, error=NoWorker("none")), 3.0)
    decoding.handle(PlaceDue(attempt=2), 3.25)
    placed(decoding, epoch=2, now=4.0)  # no token comes of it, so that the patience is not renewed
    decoding.handle(InstanceLost(instance_id="d0", error=PeerLost("gone")), 22.0)
    report, fail = placed(decoding, epoch=2, now=23.5)
    assert report.phase is ReportPhase.CANCELLED
    assert isinstance(fail.error, NoWorker)


def test_a_token_renews_the_patience(decoding: RequestState) -> None:
    decoding.handle(InstanceLost(instance_id="d0", error=PeerLost("gone")), 3.0)
    decoding.handle(PlaceFailed(attempt=2, error=NoWorker("none")), 3.0)
    decoding.handle(PlaceDue(attempt=2), 3.25)
    placed(decoding, epoch=2, now=4.0)
    assert decoding.impatient_at is not None
    arrived(decoding, 2)
    assert decoding.impatient_at is None


def test_an_incarnation_listed_long_after_its_loss_lives(decoding: RequestState) -> None:
    decoding.handle(InstanceLost(instance_id="d0", error=PeerLost("gone")), 3.0)
    placed(decoding, now=8.9)
    decoding.handle(PlaceDue(attempt=2), 9.2)
    (submit,) = placed(decoding, now=9.2)
    assert isinstance(submit, Submit)


def test_a_new_request_that_cannot_be_submitted_waits_for_the_restart(state: RequestState) -> None:
    placed(state)
    state.handle(SubmitFailed(attempt=1, error=PeerLost("refused")), 1.0)
    _, pause = placed(state, now=1.5)
    assert isinstance(pause, Pause)
    state.handle(PlaceDue(attempt=2), 1.75)
    (submit,) = placed(state, epoch=2, now=8.0)
    assert isinstance(submit, Submit)


def test_a_worker_that_sent_bad_bytes_has_not_broken(state: RequestState) -> None:
    placed(state)
    event = WorkerFailed(attempt=1, instance_id="d0", error=IntegrityError("bad bytes"))
    state.handle(event, 2.0)
    (submit,) = placed(state, now=2.0)
    assert isinstance(submit, Submit)
