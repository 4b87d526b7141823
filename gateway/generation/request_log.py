"""Log lines of a gateway's requests: one line at the end, and one for each time that a request starts again.

Rule: a line alone says what happened, to which request and how long it took, even to a reader who knows no other
process. A failure of the cluster is a warning; a client's mistake, its departure or a refusal for lack of room is not.
"""

import logging
from typing import Any

from moonserve.gateway.generation.request_state import RequestState
from moonserve.gateway.generation.request_timing import PhaseTimes
from moonserve.protocol.errors import Cancelled, InvalidRequest, MoonserveError, Overloaded
from moonserve.protocol.request import FinishReason

log = logging.getLogger(__name__)

_EXPECTED_ERRORS = (Cancelled, InvalidRequest, Overloaded)


def finished(state: RequestState, reason: FinishReason, phase_times: PhaseTimes | None) -> None:
    """Logs a request that ended well. `phase_times`: its phases, if all reports arrived."""
    if not log.isEnabledFor(logging.INFO):
        return
    facts: dict[str, Any] = {**_log_fields(state), "finish_reason": reason.value}
    text = (
        f"finished: {reason.value}; {len(state.prompt)} prompt tokens, {state.cached_tokens} of them cached, "
        f"{len(state.generated)} generated"
    )
    if phase_times is not None:
        facts |= {"ttft_s": round(phase_times.ttft_s, 6), "e2e_s": round(phase_times.e2e_s, 6)}
        text += f"; TTFT {phase_times.ttft_s:.3f} s, total {phase_times.e2e_s:.3f} s"
    log.info("%s%s", text, _workers_text(state), extra=facts)


def failed(state: RequestState, error: MoonserveError) -> None:
    """Logs a request that ended in `error`, which the client has received."""
    level = logging.INFO if isinstance(error, _EXPECTED_ERRORS) else logging.WARNING
    text = "failed: %s (%s) after %d tokens%s"
    facts = {**_log_fields(state), "code": error.code}
    log.log(level, text, error.message, error.code, len(state.generated), _workers_text(state), extra=facts)


def retried(state: RequestState) -> None:
    """Logs a lost attempt. The client keeps the tokens that it has; the rest is computed elsewhere."""
    assert state.last_loss is not None, "no attempt was lost"
    text = "continues on other workers, attempt %d: %s; the client has %d tokens and sees a pause"
    num_tokens = len(state.generated)
    log.info(text, state.attempt, state.last_loss.message, num_tokens, extra=_log_fields(state))


def _log_fields(state: RequestState) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "request_id": state.request_id,
        "attempt": state.attempt,
        "prompt_tokens": len(state.prompt),
        "cached_tokens": state.cached_tokens,
        "output_tokens": len(state.generated),
    }
    if state.placement is not None:
        facts["prefill"] = state.placement.prefill.instance_id
        facts["decode"] = state.placement.decode.instance_id
    return facts


def _workers_text(state: RequestState) -> str:
    placement = state.placement
    return "" if placement is None else f"; {placement.prefill.instance_id}, then {placement.decode.instance_id}"
