"""The phases of a request's time, from a gateway's instants and workers' reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation.timings import PHASES, Instants, Ledger, ledger
from protocol.ids import RequestId
from protocol.request import DecodeReport, PrefillReport

REQUEST = RequestId("r")
SECONDS = st.floats(0.0, 100.0)


def prefill(queue_s: float, load_s: float, compute_s: float) -> PrefillReport:
    return PrefillReport(
        request_id=REQUEST, cached_tokens=0, queue_s=queue_s, load_s=load_s, compute_s=compute_s
    )


def found(at: Instants, before: PrefillReport, behind: DecodeReport | None) -> Ledger:
    made = ledger(at, before, behind)
    assert made is not None
    return made


@given(
    arrived_at=st.floats(0.0, 1e6),
    parts=st.tuples(*[SECONDS] * 7),
    ways=st.tuples(*[SECONDS] * 4),
)
def test_the_phases_are_all_of_the_time(
    arrived_at: float, parts: tuple[float, ...], ways: tuple[float, ...]
) -> None:
    """Whatever a worker's clock shows, since only durations reach the ledger; and however late what comes is heard."""
    placing_s, queue_s, load_s, prefill_s, transfer_s, decode_queue_s, decode_s = parts
    submission_s, answer_s, first_way_s, last_way_s = ways
    submitted_at = arrived_at + placing_s
    taken_at = submitted_at + submission_s
    made_at = taken_at + queue_s + load_s + prefill_s
    ended_at = made_at + transfer_s + decode_queue_s + decode_s + last_way_s
    at = Instants(arrived_at=arrived_at, attempted_at=arrived_at)
    at.submitted_at = submitted_at
    at.tokens(min(made_at + first_way_s, ended_at))  # they come in order, at the latest together
    at.answered_at = taken_at + answer_s
    at.tokens(ended_at)
    report = DecodeReport(request_id=REQUEST, transfer_s=transfer_s, queue_s=decode_queue_s)
    made = found(at, prefill(queue_s, load_s, prefill_s), report)
    phases = made.phases()
    assert sum(phases.values()) == pytest.approx(made.e2e_s, abs=1e-6)
    assert made.unaccounted_s == pytest.approx(0.0, abs=1e-6)
    told = ("queue", "load", "prefill", "transfer", "decode_queue")
    assert [phases[phase] for phase in told] == list(parts[1:6])
    late_s = min(answer_s, first_way_s)  # as far as the submission's end is not known
    assert placing_s - 1e-6 <= made.gateway_s <= placing_s + submission_s + late_s + 1e-6
    assert made.decode_s >= decode_s + last_way_s - late_s - 1e-6


@given(parts=st.tuples(*[SECONDS] * 3), ways=st.tuples(*[SECONDS] * 3))
def test_an_answer_of_one_token_has_all_its_time_in_phases(
    parts: tuple[float, ...], ways: tuple[float, ...]
) -> None:
    """Nothing is handed over then: behind prefill there is only the token's way."""
    submission_s, answer_s, way_s = ways
    at = Instants(arrived_at=0.0, attempted_at=0.0)
    at.submitted_at = 0.5
    at.answered_at = 0.5 + submission_s + answer_s
    at.tokens(0.5 + submission_s + sum(parts) + way_s)
    made = found(at, prefill(*parts), None)
    assert made.unaccounted_s == pytest.approx(0.0, abs=1e-6)
    assert made.decode_s <= way_s + 1e-6
    assert made.transfer_s == made.decode_queue_s == 0.0


def test_a_worker_that_tells_of_more_time_than_there_was_is_shown() -> None:
    at = Instants(arrived_at=0.0, attempted_at=0.0)
    at.submitted_at = 1.0
    at.tokens(2.0)
    assert found(at, prefill(0.0, 0.0, 3.0), None).unaccounted_s == pytest.approx(-2.0)


def test_what_a_lost_attempt_took_is_retry() -> None:
    at = Instants(arrived_at=10.0, attempted_at=10.0)
    at.submitted_at = 10.1
    at.tokens(10.5)
    at.attempt(12.0)
    at.submitted_at = 12.25
    at.tokens(13.0)
    made = found(at, prefill(0.25, 0.0, 0.5), None)
    assert (made.ttft_s, made.retry_s, made.gateway_s) == (0.5, 2.0, 0.25)
    assert made.unaccounted_s == pytest.approx(0.0)


def test_a_first_token_before_the_answer_to_the_submission_ends_nothing_later() -> None:
    at = Instants(arrived_at=0.0, attempted_at=0.0)
    at.submitted_at = 0.5
    at.tokens(2.0)
    at.answered_at = 2.5
    assert found(at, prefill(0.0, 0.0, 1.0), None).gateway_s == 1.0


def test_without_a_prefills_report_there_is_none() -> None:
    at = Instants(arrived_at=0.0, attempted_at=0.0)
    at.submitted_at = 1.0
    at.tokens(2.0)
    assert ledger(at, None, None) is None


def test_as_json_it_has_every_phase_in_seconds() -> None:
    at = Instants(arrived_at=0.0, attempted_at=0.0)
    at.submitted_at = 0.1
    at.answered_at = 0.1234567
    at.tokens(1.0)
    shown = found(at, prefill(0.0, 0.0, 0.5), None).as_json()
    assert list(shown) == ["e2e_s", "ttft_s", *(f"{p}_s" for p in PHASES), "unaccounted_s"]
    assert shown["gateway_s"] == 0.123457
