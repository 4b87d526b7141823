"""What the gateway's log says of a request's end: whose fault it was decides how loudly."""

from __future__ import annotations

import logging

import pytest

from gateway.generation import request_log
from gateway.generation.timings import PHASES, Ledger
from protocol.errors import Cancelled, MoonserveError, NoWorker, Overloaded
from protocol.request import FinishReason
from tests.gateway.requests import new_state

LEDGER = Ledger(e2e_s=1.5, ttft_s=0.25, **dict.fromkeys([f"{phase}_s" for phase in PHASES], 0.0))


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (None, logging.INFO),
        (Cancelled("the client went away"), logging.INFO),
        (Overloaded("ttft_slo", retry_after_s=1.0), logging.INFO),
        (NoWorker("nobody is there"), logging.WARNING),
        (MoonserveError("internal error"), logging.WARNING),
    ],
)
def test_an_end_is_one_line_with_everything_and_only_our_failures_are_warnings(
    caplog: pytest.LogCaptureFixture, error: MoonserveError | None, level: int
) -> None:
    caplog.set_level(logging.INFO)
    state = new_state()
    state.arrivals.generated += (7, 8)
    if error is None:
        request_log.finished(state, FinishReason.STOP, LEDGER)
        expected = "finished: stop; 3 prompt tokens, 0 of them cached, 2 generated; first after 0.250 s, 1.500 s in all"
    else:
        request_log.failed(state, error)
        expected = f"failed: {error.message} ({error.code}) after 2 tokens"
    [record] = caplog.records
    assert (record.levelno, record.getMessage()) == (level, expected)
    told = {"request_id": "r"} | ({"code": error.code} if error else {"finish_reason": "stop"})
    assert vars(record).items() >= told.items()
