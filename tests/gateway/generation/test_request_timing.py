"""Report of a request's end: the phases of its time, from gateway and workers, and its log line."""

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.gateway.generation import request_log
from moonserve.gateway.generation.request_timing import PHASES, Instants, PhaseTimes, phase_times
from moonserve.protocol.errors import Cancelled, MoonserveError, NoWorker, Overloaded
from moonserve.protocol.request import DecodeReport, FinishReason, PrefillReport, RequestId
from tests.gateway.generation.test_request_state import new_state

REQUEST = RequestId("r")
SECONDS = st.floats(0.0, 100.0)


def made(
    arrived_at: float,
    tokens: list[float],
    prefill: tuple[float, ...],
    decode: tuple[float, float] | None = None,
    **instants: Any,
) -> PhaseTimes:
    """Makes phase times. `tokens`: arrival times. `prefill` and `decode`: seconds reported by the workers."""
    at = Instants(arrived_at=arrived_at, attempted_at=arrived_at, **instants)
    for now in tokens:
        at.tokens(now)
    names = ("queue_s", "load_s", "compute_s")
    prefill_report = PrefillReport(request_id=REQUEST, cached_tokens=0, **dict(zip(names, prefill, strict=True)))
    report = decode and DecodeReport(request_id=REQUEST, transfer_s=decode[0], queue_s=decode[1])
    found = phase_times(at, prefill_report, report)
    assert phase_times(at, None, report) is None, "nothing is known without a prefill's report"
    return found


@given(
    arrived_at=st.floats(0.0, 1e6),
    parts=st.tuples(*[SECONDS] * 7),
    ways=st.tuples(*[SECONDS] * 4),
    is_single=st.booleans(),
)
def test_phases_sum_to_the_whole_time(
    arrived_at: float, parts: tuple[float, ...], ways: tuple[float, ...], is_single: bool
) -> None:
    """The phases add up to the whole time, however late messages arrive. Workers' clocks do not matter, since only
    durations reach the phase times. A single token has no handoff: only its way to the gateway follows prefill."""
    placing_s, queue_s, load_s, prefill_s, transfer_s, decode_queue_s, decode_s = parts
    submission_s, answer_s, first_way_s, last_way_s = ways
    submitted_at = arrived_at + placing_s
    queued_at = submitted_at + submission_s
    made_at = queued_at + queue_s + load_s + prefill_s
    ended_at = made_at + transfer_s + decode_queue_s + decode_s + last_way_s
    found = made(
        arrived_at,
        [made_at + first_way_s] if is_single else [min(made_at + first_way_s, ended_at), ended_at],
        (queue_s, load_s, prefill_s),
        None if is_single else (transfer_s, decode_queue_s),
        submitted_at=submitted_at,
        answered_at=queued_at + answer_s,
    )
    phases = found.phases()
    assert sum(phases.values()) == pytest.approx(found.e2e_s, abs=1e-6)
    assert found.unaccounted_s == pytest.approx(0.0, abs=1e-6)
    reported = [phases[phase] for phase in ("queue", "load", "prefill", "transfer", "decode_queue")]
    assert reported == [*parts[1:4], *((0.0, 0.0) if is_single else parts[4:6])]
    late_s = min(answer_s, first_way_s)  # uncertainty of the time at which the worker took the submission
    assert placing_s - 1e-6 <= found.gateway_s <= placing_s + submission_s + late_s + 1e-6
    if is_single:
        assert found.decode_s <= first_way_s + 1e-6
    else:
        assert found.decode_s >= decode_s + last_way_s - late_s - 1e-6


def test_excess_reported_time_makes_unaccounted_time_negative() -> None:
    found = made(0.0, [2.0], (0.0, 0.0, 3.0), submitted_at=1.0)
    assert found.unaccounted_s == pytest.approx(-2.0)


def test_time_of_a_lost_attempt_counts_as_retry() -> None:
    at = Instants(arrived_at=10.0, attempted_at=10.0, submitted_at=10.1)
    at.tokens(10.5)
    at.attempt(12.0)
    at.submitted_at = 12.25
    at.tokens(13.0)
    report = PrefillReport(request_id=REQUEST, cached_tokens=0, queue_s=0.25, load_s=0.0, compute_s=0.5)
    found = phase_times(at, report, None)
    assert (found.ttft_s, found.retry_s, found.gateway_s) == (0.5, 2.0, 0.25)
    assert found.unaccounted_s == pytest.approx(0.0)


LEDGER = PhaseTimes(e2e_s=1.5, ttft_s=0.25, **dict.fromkeys([f"{phase}_s" for phase in PHASES], 0.0))


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (None, logging.INFO),
        (Cancelled("the client disconnected"), logging.INFO),
        (Overloaded("ttft_slo", retry_after_s=1.0), logging.INFO),
        (NoWorker("nobody is there"), logging.WARNING),
        (MoonserveError("internal error"), logging.WARNING),
    ],
)
def test_end_of_request_logs_one_line_and_warns_only_of_cluster_failures(
    caplog: pytest.LogCaptureFixture, error: MoonserveError | None, level: int
) -> None:
    caplog.set_level(logging.INFO)
    state = new_state()
    state.ordered_tokens.generated += (7, 8)
    if error is None:
        request_log.finished(state, FinishReason.STOP, LEDGER)
        expected = "finished: stop; 3 prompt tokens, 0 of them cached, 2 generated; TTFT 0.250 s, total 1.500 s"
    else:
        request_log.failed(state, error)
        expected = f"failed: {error.message} ({error.code}) after 2 tokens"
    [record] = caplog.records
    assert (record.levelno, record.getMessage()) == (level, expected)
    fields = {"request_id": "r"} | ({"code": error.code} if error else {"finish_reason": "stop"})
    assert vars(record).items() >= fields.items()
