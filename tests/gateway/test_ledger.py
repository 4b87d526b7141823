"""The phases of a request's time, from a gateway's instants and workers' reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ledger import PHASES, Instants, Ledger, ledger
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
    start=st.floats(0.0, 1e6),
    parts=st.tuples(*[SECONDS] * 7),
    way_s=SECONDS,
)
def test_the_phases_and_the_first_tokens_way_are_all_of_the_time(
    start: float, parts: tuple[float, ...], way_s: float
) -> None:
    """Whatever a worker's clock shows: only durations reach the ledger."""
    gateway_s, queue_s, load_s, prefill_s, transfer_s, decode_queue_s, decode_s = parts
    at = Instants(arrived_at=start, attempted_at=start)
    at.submitted(start + gateway_s)
    first_at = start + gateway_s + queue_s + load_s + prefill_s + way_s
    at.tokens(first_at)
    at.tokens(first_at + transfer_s + decode_queue_s + decode_s)
    report = DecodeReport(request_id=REQUEST, transfer_s=transfer_s, queue_s=decode_queue_s)
    made = found(at, prefill(queue_s, load_s, prefill_s), report)
    assert made.phases() == pytest.approx(dict(zip(PHASES, (0.0, *parts), strict=True)), abs=1e-6)
    assert made.unaccounted_s == pytest.approx(way_s, abs=1e-6)
    assert sum(made.phases().values()) + made.unaccounted_s == pytest.approx(made.e2e_s)


def test_what_a_lost_attempt_took_is_retry() -> None:
    at = Instants(arrived_at=10.0, attempted_at=10.0)
    at.submitted(10.1)
    at.tokens(10.5)
    at.attempt(12.0)
    at.submitted(12.25)
    at.tokens(13.0)
    made = found(at, prefill(0.25, 0.0, 0.5), None)
    assert (made.ttft_s, made.retry_s, made.gateway_s) == (0.5, 2.0, 0.25)
    assert made.unaccounted_s == pytest.approx(0.0)


def test_a_first_token_before_the_answer_to_the_submission_ends_nothing_later() -> None:
    at = Instants(arrived_at=0.0, attempted_at=0.0)
    at.submitted(1.0)
    at.tokens(2.0)
    at.submitted(2.5)
    assert found(at, prefill(0.0, 0.0, 1.0), None).gateway_s == 1.0


def test_without_a_prefills_report_there_is_none() -> None:
    at = Instants(arrived_at=0.0, attempted_at=0.0)
    at.submitted(1.0)
    at.tokens(2.0)
    assert ledger(at, None, None) is None


def test_as_json_it_has_every_phase_in_seconds() -> None:
    at = Instants(arrived_at=0.0, attempted_at=0.0)
    at.submitted(0.1234567)
    at.tokens(1.0)
    shown = found(at, prefill(0.0, 0.0, 0.5), None).as_json()
    assert list(shown) == ["e2e_s", "ttft_s", *(f"{p}_s" for p in PHASES), "unaccounted_s"]
    assert shown["gateway_s"] == 0.123457
