"""A prefill worker's spans of a traced request. Called for no other."""

from __future__ import annotations

from prefill_worker.actions import CommitHandoff, SendFirstToken
from protocol.tracing import Tracer


def trace_prefill(tracer: Tracer, action: SendFirstToken, now: float) -> None:
    """From the submission to the first token. Its parts are laid end to end: a prompt that shares the engine waits and
    computes in turns, and only the sums are known."""
    report = action.report
    parts = {"queue": report.queue_s, "load": report.load_s, "compute": report.compute_s}
    at = now - sum(parts.values())
    parent = tracer.span("prefill", action.traceparent, at, now, cached_tokens=report.cached_tokens)
    for name, seconds in parts.items():
        tracer.span(name, parent, at, at + seconds)
        at += seconds


def trace_transfer(tracer: Tracer, action: CommitHandoff, now: float) -> None:
    """From the first token to the last byte, when the decode worker is told."""
    tracer.span(
        "transfer",
        action.request.traceparent,
        now - action.transfer_s,
        now,
        decode_instance=action.decode.instance_id,
        blocks_sent=len(action.checksums),
        blocks_cached=action.num_cached_blocks,
    )
