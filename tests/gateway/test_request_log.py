"""What the gateway's log says of a request's end: whose fault it was decides how loudly."""

from __future__ import annotations

import logging

import pytest

from gateway.generation import request_log
from gateway.generation.state import RequestState
from gateway.generation.timings import Ledger
from protocol.errors import Cancelled, MoonserveError, NoWorker, Overloaded
from protocol.ids import RequestId
from protocol.request import FinishReason, SamplingParams


class Silent:
    """Text of no token."""

    stopped = includes_stop = False

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def a_state(generated: tuple[int, ...] = (), **members: object) -> RequestState:
    made = RequestState(
        request_id=RequestId("req-1"),
        prompt=(1, 2, 3),
        sampling=SamplingParams(max_tokens=4),
        output=Silent(),
        deadline_at=9.0,
    )
    made.arrivals.generated += generated
    for name, value in members.items():
        setattr(made, name, value)
    return made


LEDGER = Ledger(
    e2e_s=1.5, ttft_s=0.25, retry_s=0, gateway_s=0, queue_s=0, load_s=0, prefill_s=0, transfer_s=0,
    decode_queue_s=0, decode_s=0,
)  # fmt: skip


def test_an_end_is_one_line_with_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    request_log.finished(a_state(generated=(7, 8)), FinishReason.STOP, LEDGER)
    [record] = caplog.records
    assert record.getMessage() == (
        "finished: stop; 3 prompt tokens, 0 of them cached, 2 generated; first after 0.250 s, 1.500 s in all"
    )
    told = vars(record)
    assert (told["request_id"], told["finish_reason"], told["e2e_s"]) == ("req-1", "stop", 1.5)


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (Cancelled("the client went away"), logging.INFO),
        (Overloaded("ttft_slo", retry_after_s=1.0), logging.INFO),
        (NoWorker("nobody is there"), logging.WARNING),
        (MoonserveError("internal error"), logging.WARNING),
    ],
)
def test_only_our_failures_are_warnings(
    caplog: pytest.LogCaptureFixture, error: MoonserveError, level: int
) -> None:
    caplog.set_level(logging.INFO)
    request_log.failed(a_state(generated=(7,)), error)
    [record] = caplog.records
    assert record.levelno == level
    assert record.getMessage() == f"failed: {error.message} ({error.code}) after 1 tokens"
