"""How long a sequence waited and computed here, told with the tokens that end each of the two. Pure."""

from __future__ import annotations

from decode_worker.actions import DecodePhase, SendTokens
from decode_worker.sequence import Sequence
from protocol.request import DecodeReport, Token


def note_times(sequence: Sequence, token: Token, sending: SendTokens, *, began_at: float) -> None:
    """Adds to `sending`, which has `token` of a step that began at `began_at`, what is known with it."""
    landed, request = sequence.landed, sequence.request
    if landed is None:  # it was prefilled here: there was no way from elsewhere
        return
    if landed.began_at is None:
        landed.began_at = began_at
        sending.began.append(
            DecodeReport(
                request_id=request.request_id,
                transfer_s=landed.transfer_s,
                queue_s=began_at - landed.committed_at,
            )
        )
    if request.traceparent and token.finish_reason is not None:
        sending.ended.append(
            DecodePhase(
                traceparent=request.traceparent,
                queued_at=landed.committed_at,
                began_at=landed.began_at,
                num_tokens=len(sequence.token_ids) - len(request.token_ids),
                times_preempted=sequence.times_preempted,
            )
        )
