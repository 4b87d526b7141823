"""One request's life: events in, actions out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.cluster.avoidance import DOUBT_S
from gateway.events import (
    Aborted,
    CancelAt,
    Emit,
    Fail,
    InstanceLost,
    Pause,
    Place,
    Placed,
    PlaceFailed,
    PrefillReported,
    Report,
    ReportPhase,
    RetryDue,
    Started,
    Submit,
    SubmitFailed,
    WorkerFailed,
)
from gateway.state import MAX_ATTEMPTS, Phase, RequestState
from protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    IntegrityError,
    InvalidRequest,
    MoonserveError,
    NotLeader,
    NoWorker,
    Overloaded,
    PeerLost,
)
from protocol.ids import RequestId
from protocol.request import (
    FinishReason,
    PrefillReport,
)
from tests.gateway.requests import EOS, arrived, new_state, of, placed, placement


@pytest.fixture
def state() -> Iterator[RequestState]:
    made = new_state()
    made.handle(Started(), 0.0)
    yield made
    made.validate()


@pytest.fixture
def decoding(state: RequestState) -> RequestState:
    placed(state)
    arrived(state, 0)
    arrived(state, 1)
    return state


def test_a_request_is_placed_submitted_read_and_finished(state: RequestState) -> None:
    (submit,) = placed(state)
    assert isinstance(submit, Submit)
    assert submit.token_ids == (7, 8, 9)
    assert state.phase is Phase.PREFILLING
    report, emit = arrived(state, 0)
    assert report.phase is ReportPhase.FIRST_TOKEN
    assert report.elapsed_s == 1.0
    assert emit.text == "a"
    assert state.phase is Phase.DECODING
    emit, report = arrived(state, 1, 2, 3, 4)
    assert (emit.text, emit.finish_reason) == ("bcde", FinishReason.LENGTH)
    assert report.phase is ReportPhase.FINISHED
    assert state.phase is Phase.FINISHED


def test_a_stop_token_ends_the_request_and_has_no_text(decoding: RequestState) -> None:
    actions = arrived(decoding, 2, ids={2: EOS})
    (emit,) = of(Emit, actions)
    assert (emit.text, emit.finish_reason, len(emit.tokens)) == ("", FinishReason.STOP, 1)
    assert of(CancelAt, actions) == []


def test_a_stop_string_ends_the_request_and_cancels_at_both_workers(decoding: RequestState) -> None:
    actions = arrived(decoding, 2, 3, ids={2: 25})
    (emit,) = of(Emit, actions)
    assert (emit.text, emit.finish_reason, len(emit.tokens)) == ("", FinishReason.STOP, 1)
    (cancel,) = of(CancelAt, actions)
    assert [e.instance_id for e in cancel.endpoints] == ["p0", "d0"]


def test_duplicates_are_ignored(decoding: RequestState) -> None:
    assert arrived(decoding, 0, 1) == []
    (emit,) = arrived(decoding, 1, 2)
    assert emit.text == "c"


def test_tokens_of_decode_may_overtake_the_first_one(state: RequestState) -> None:
    placed(state)
    assert arrived(state, 1) == []
    assert arrived(state, 2, 3) == []
    (emit,) = of(Emit, arrived(state, 0))
    assert emit.text == "abcd"


def test_a_gap_is_a_loss_and_goes_on_elsewhere_from_what_was_emitted(
    decoding: RequestState,
) -> None:
    cancel, report, place = arrived(decoding, 3)
    assert cancel.request_id == "r"
    assert report.phase is ReportPhase.FAILED
    assert place.request_id == "r~2"
    assert place.token_ids == (7, 8, 9, 0, 1)
    assert place.max_tokens == 3


def test_an_abandoned_attempt_is_not_heard_any_more(decoding: RequestState) -> None:
    decoding.handle(InstanceLost(instance_id="d0", error=PeerLost("gone")), 3.0)
    assert arrived(decoding, 2, attempt=1) == []
    placed(decoding, decode="d1")
    (emit,) = of(Emit, arrived(decoding, 2))
    assert emit.text == "c"


def test_a_lost_decode_worker_is_excluded(decoding: RequestState) -> None:
    (place,) = of(
        Place, decoding.handle(InstanceLost(instance_id="d0", error=PeerLost("gone")), 3.0)
    )
    assert place.excluded == {("d0", 1)}


def test_a_lost_prefill_worker_does_not_matter_after_the_handoff(decoding: RequestState) -> None:
    event = InstanceLost(instance_id="p0", error=PeerLost("gone"))
    assert decoding.handle(event, 3.0) == []


def test_a_prefill_worker_lost_before_the_handoff_is_replaced(state: RequestState) -> None:
    placed(state)
    arrived(state, 0)
    event = InstanceLost(instance_id="p0", error=PeerLost("gone"))
    (place,) = of(Place, state.handle(event, 3.0))
    assert place.excluded == {("p0", 1)}
    assert place.token_ids == (7, 8, 9, 0)


def test_the_loss_of_an_instance_that_has_no_part_in_it_is_nothing(decoding: RequestState) -> None:
    event = InstanceLost(instance_id="d7", error=PeerLost("gone"))
    assert decoding.handle(event, 3.0) == []


@pytest.mark.parametrize(
    ("instance_id", "error", "excluded"),
    [
        ("p0", PeerLost("decode gone"), {"d0"}),
        ("p0", PeerLost("it was", instance_id="p0"), {"p0"}),
        ("p0", IntegrityError("bad bytes"), {"p0"}),
        ("d0", IntegrityError("bad bytes"), {"d0"}),
    ],
)
def test_who_is_avoided_next_time(
    state: RequestState, instance_id: str, error: MoonserveError, excluded: set[str]
) -> None:
    placed(state)
    event = WorkerFailed(attempt=1, instance_id=instance_id, error=error)
    (place,) = of(Place, state.handle(event, 2.0))
    assert place.excluded == {(name, 1) for name in excluded}


def test_three_attempts_are_enough(state: RequestState) -> None:
    for attempt in range(1, MAX_ATTEMPTS + 1):
        placed(state, epoch=attempt)
        event = WorkerFailed(attempt=attempt, instance_id="d0", error=PeerLost("gone"))
        actions = state.handle(event, 2.0)
    assert of(Place, actions) == []
    assert isinstance(of(Fail, actions)[0].error, PeerLost)


def test_attempts_that_got_somewhere_are_not_counted() -> None:
    state = new_state(max_tokens=1000)
    state.handle(Started(), 0.0)
    for epoch in range(1, 2 * MAX_ATTEMPTS):
        placed(state, epoch=epoch)
        indexes = range(20 * (epoch - 1), 20 * epoch)
        arrived(state, *indexes, ids=dict.fromkeys(indexes, 1))
        (place,) = of(Place, lose(state, PeerLost("gone")))
        assert len(place.token_ids) == len(state.prompt) + 20 * epoch


def test_a_token_per_attempt_is_no_reason_for_another_one() -> None:
    """The prefill worker always makes one; who breaks every decode worker must not meet them all."""
    state = new_state(max_tokens=1000)
    state.handle(Started(), 0.0)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        placed(state, epoch=attempt)
        arrived(state, attempt - 1)
        actions = lose(state, PeerLost("gone"))
    assert of(Fail, actions)


def test_a_worker_that_is_taken_out_of_service_is_not_held_against_the_request(
    state: RequestState,
) -> None:
    for _ in range(2 * MAX_ATTEMPTS):
        placed(state)
        assert of(Place, lose(state, NoWorker("draining")))


def lose(state: RequestState, error: MoonserveError) -> list:
    """The current attempt, at its decode worker."""
    event = WorkerFailed(attempt=state.attempt, instance_id="d0", error=error)
    return state.handle(event, 2.0)


def test_a_failure_that_repeating_cannot_help_ends_the_request(state: RequestState) -> None:
    placed(state)
    event = WorkerFailed(attempt=1, instance_id="p0", error=InvalidRequest("no"))
    assert of(Fail, state.handle(event, 2.0))
    assert state.phase is Phase.FAILED


@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=2.0), NoWorker("none")])
def test_the_first_placement_is_refused_at_once(state: RequestState, error: MoonserveError) -> None:
    (fail,) = state.handle(PlaceFailed(attempt=1, error=error), 0.0)
    assert fail.error is error


def test_a_new_request_waits_for_workers_that_were_there_a_moment_ago(state: RequestState) -> None:
    absent = PlaceFailed(attempt=1, error=NoWorker("none"), may_return=True)
    assert of(Pause, state.handle(absent, 0.0))
    assert of(Place, state.handle(RetryDue(attempt=1), 0.25))
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
    (place,) = state.handle(RetryDue(attempt=1), 0.5)
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
    (place,) = decoding.handle(RetryDue(attempt=2), 3.5)
    assert place.excluded == {("d0", 1)}
    (fail,) = decoding.handle(PlaceFailed(attempt=2, error=error), 30.0)
    assert fail.error is error


def test_who_failed_is_still_avoided_after_a_rejected_second_attempt(state: RequestState) -> None:
    placed(state)
    failed = WorkerFailed(attempt=1, instance_id="p0", error=IntegrityError("bad bytes"))
    state.handle(failed, 2.0)
    state.handle(PlaceFailed(attempt=2, error=Overloaded("full", retry_after_s=2.0)), 2.0)
    (place,) = state.handle(RetryDue(attempt=2), 2.25)
    assert place.excluded == {("p0", 1)}


def test_who_only_failed_gets_another_chance_when_there_is_nobody_else(state: RequestState) -> None:
    placed(state)
    failed = WorkerFailed(attempt=1, instance_id="p0", error=IntegrityError("bad bytes"))
    state.handle(failed, 2.0)
    state.handle(PlaceFailed(attempt=2, error=NoWorker("none")), 2.0)
    (place,) = state.handle(RetryDue(attempt=2), 2.25)
    assert place.excluded == frozenset()


def test_who_broke_is_let_in_again_once_the_conductor_must_have_noticed_its_death(
    decoding: RequestState,
) -> None:
    decoding.handle(InstanceLost(instance_id="d0", error=PeerLost("gone")), 3.0)
    decoding.handle(PlaceFailed(attempt=2, error=NoWorker("none")), 3.0 + DOUBT_S)
    (place,) = decoding.handle(RetryDue(attempt=2), 3.25 + DOUBT_S)
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
        (place,) = decoding.handle(RetryDue(attempt=2), 3.2)
        assert place.excluded == excluded


def test_a_failed_submission_avoids_that_prefill_worker(state: RequestState) -> None:
    placed(state)
    (place,) = of(Place, state.handle(SubmitFailed(attempt=1, error=PeerLost("x")), 2.0))
    assert place.excluded == {("p0", 1)}


def test_no_attempt_begins_after_the_deadline(state: RequestState) -> None:
    placed(state)
    actions = state.handle(SubmitFailed(attempt=1, error=PeerLost("x")), 101.0)
    assert isinstance(of(Fail, actions)[0].error, DeadlineExceeded)


def test_a_client_that_leaves_cancels_at_both_workers_and_reports_it(
    decoding: RequestState,
) -> None:
    cancel, report, fail = decoding.handle(Aborted(error=Cancelled("left")), 3.0)
    assert isinstance(cancel, CancelAt)
    assert isinstance(report, Report)
    assert report.phase is ReportPhase.CANCELLED
    assert isinstance(fail, Fail)
    assert decoding.handle(Aborted(error=Cancelled("left")), 3.0) == []


def test_a_placement_that_comes_too_late_is_given_back(state: RequestState) -> None:
    state.handle(Aborted(error=Cancelled("left")), 0.5)
    (report,) = placed(state)
    assert report.phase is ReportPhase.CANCELLED


def test_cached_tokens_are_those_of_the_first_attempt(state: RequestState) -> None:
    for cached in (2, 500):
        report = PrefillReport(
            request_id=RequestId("r"), cached_tokens=cached, queue_s=0, load_s=0, compute_s=0
        )
        state.handle(PrefillReported(attempt=1, report=report), 1.0)
    assert state.cached_tokens == 2


def test_a_lost_incarnation_is_waited_out_without_an_attempt(decoding: RequestState) -> None:
    decoding.handle(InstanceLost(instance_id="d0", error=PeerLost("gone")), 3.0)
    for _ in range(8):
        report, pause = placed(decoding, now=3.5)
        assert (report.request_id, report.phase) == ("r~2", ReportPhase.CANCELLED)
        assert isinstance(pause, Pause)
        (place,) = decoding.handle(RetryDue(attempt=2), 3.75)
        assert (place.attempt, place.excluded) == (2, {("d0", 1)})
        decoding.handle(PlaceFailed(attempt=2, error=NoWorker("none")), 3.75)
        (place,) = decoding.handle(RetryDue(attempt=2), 4.0)
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
    (place,) = state.handle(RetryDue(attempt=1), 1.25)
    assert (place.attempt, place.excluded) == (1, frozenset())  # its successor may have it
    (submit,) = placed(state, epoch=2)
    assert isinstance(submit, Submit)


def test_patience_with_a_lost_incarnation_ends(decoding: RequestState) -> None:
    decoding.handle(InstanceLost(instance_id="d0", error=PeerLost("gone")), 3.0)
    decoding.handle(PlaceFailed(attempt=2, error=NoWorker("none")), 3.0)
    decoding.handle(RetryDue(attempt=2), 3.25)
    placed(decoding, epoch=2, now=4.0)  # no token comes of it, so that the patience is not renewed
    decoding.handle(InstanceLost(instance_id="d0", error=PeerLost("gone")), 22.0)
    report, fail = placed(decoding, epoch=2, now=23.5)
    assert report.phase is ReportPhase.CANCELLED
    assert isinstance(fail.error, NoWorker)


def test_a_token_renews_the_patience(decoding: RequestState) -> None:
    decoding.handle(InstanceLost(instance_id="d0", error=PeerLost("gone")), 3.0)
    decoding.handle(PlaceFailed(attempt=2, error=NoWorker("none")), 3.0)
    decoding.handle(RetryDue(attempt=2), 3.25)
    placed(decoding, epoch=2, now=4.0)
    assert decoding.impatient_at is not None
    arrived(decoding, 2)
    assert decoding.impatient_at is None


def test_an_incarnation_listed_long_after_its_loss_lives(decoding: RequestState) -> None:
    decoding.handle(InstanceLost(instance_id="d0", error=PeerLost("gone")), 3.0)
    placed(decoding, now=8.9)
    decoding.handle(RetryDue(attempt=2), 9.2)
    (submit,) = placed(decoding, now=9.2)
    assert isinstance(submit, Submit)


def test_a_new_request_that_cannot_be_submitted_waits_for_the_restart(state: RequestState) -> None:
    placed(state)
    state.handle(SubmitFailed(attempt=1, error=PeerLost("refused")), 1.0)
    _, pause = placed(state, now=1.5)
    assert isinstance(pause, Pause)
    state.handle(RetryDue(attempt=2), 1.75)
    (submit,) = placed(state, epoch=2, now=8.0)
    assert isinstance(submit, Submit)


def test_a_worker_that_sent_bad_bytes_has_not_broken(state: RequestState) -> None:
    placed(state)
    event = WorkerFailed(attempt=1, instance_id="d0", error=IntegrityError("bad bytes"))
    state.handle(event, 2.0)
    (submit,) = placed(state, now=2.0)
    assert isinstance(submit, Submit)
