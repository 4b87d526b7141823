"""One request's life: events in, actions out."""

from __future__ import annotations

import pytest

from gateway.generation.events import (
    Aborted,
    CancelAt,
    Fail,
    InstanceLost,
    Piece,
    Place,
    PlaceDue,
    Report,
    Reported,
    ReportPhase,
    Submit,
    SubmitFailed,
    WorkerFailed,
)
from gateway.generation.state import MAX_ATTEMPTS, Phase, RequestState
from protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    IntegrityError,
    InvalidRequest,
    MoonserveError,
    NoWorker,
    PeerLost,
)
from protocol.ids import RequestId
from protocol.request import (
    FinishReason,
    PrefillReport,
)
from tests.gateway.requests import EOS, arrived, new_state, of, placed


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
    (emit,) = of(Piece, actions)
    assert (emit.text, emit.finish_reason, len(emit.tokens)) == ("", FinishReason.STOP, 1)
    assert of(CancelAt, actions) == []


def test_a_stop_string_ends_the_request_and_cancels_at_both_workers(decoding: RequestState) -> None:
    actions = arrived(decoding, 2, 3, ids={2: 25})
    (emit,) = of(Piece, actions)
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
    (emit,) = of(Piece, arrived(state, 0))
    assert emit.text == "abcd"


def test_one_that_is_missing_behind_the_first_is_a_loss(state: RequestState) -> None:
    placed(state)
    assert arrived(state, 2) == []
    assert of(Place, arrived(state, 0))


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
    (emit,) = of(Piece, arrived(decoding, 2))
    assert emit.text == "c"


@pytest.mark.parametrize(
    ("lost", "num_arrived", "token_ids"),
    [
        ("d0", 2, (7, 8, 9, 0, 1)),
        ("p0", 1, (7, 8, 9, 0)),
        ("p0", 2, None),  # the handoff is over
        ("d7", 1, None),  # it has no part in it
    ],
)
def test_a_lost_worker_that_is_needed_is_replaced(
    state: RequestState, lost: str, num_arrived: int, token_ids: tuple[int, ...] | None
) -> None:
    placed(state)
    arrived(state, *range(num_arrived))
    actions = state.handle(InstanceLost(instance_id=lost, error=PeerLost("gone")), 3.0)
    if token_ids is None:
        assert actions == []
    else:
        (place,) = of(Place, actions)
        assert (place.excluded, place.token_ids) == ({(lost, 1)}, token_ids)


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
    state.handle(PlaceDue(), 0.0)
    for epoch in range(1, 2 * MAX_ATTEMPTS):
        placed(state, epoch=epoch)
        indexes = range(20 * (epoch - 1), 20 * epoch)
        arrived(state, *indexes, ids=dict.fromkeys(indexes, 1))
        (place,) = of(Place, lose(state, PeerLost("gone")))
        assert len(place.token_ids) == len(state.prompt) + 20 * epoch


def test_a_token_per_attempt_is_no_reason_for_another_one() -> None:
    """The prefill worker always makes one; who breaks every decode worker must not meet them all."""
    state = new_state(max_tokens=1000)
    state.handle(PlaceDue(), 0.0)
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
        state.handle(Reported(attempt=1, report=report), 1.0)
    assert state.cached_tokens == 2
