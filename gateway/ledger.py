"""Where one request's time went, phase by phase, each measured on the clock of one host. Pure.

    |-- gateway --|-- queue, load, prefill --|-- transfer --|-- decode queue --|-- decode --|
    arrival    taken by prefill         first token                                  last token

The prefill worker measures its own phases until the first token, and the way of the KV from there to the handoff; the
decode worker the wait for its first step; the gateway all of the time. So `decode` is what the others leave: the decode
steps, and the last token's way to the gateway. No instants of two hosts meet. When the prefill worker took the request
is known to lie between the submission and its answer, of which a busy loop hears late, even after the first token; it
was at the latest as long before the tokens as the workers' phases took.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.request import DecodeReport, PrefillReport

PHASES = ("retry", "gateway", "queue", "load", "prefill", "transfer", "decode_queue", "decode")
"""In their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Seconds of one choice; of several attempts the last one's, with those before it as `retry_s`."""

    e2e_s: float  # arrival of the whole request at the gateway to the last token there
    ttft_s: float  # arrival to the first token that the client got
    retry_s: float  # until the last attempt began
    gateway_s: float  # reading it, placing, until the prefill worker had taken it
    queue_s: float  # at the prefill worker, for landing blocks and for the engine
    load_s: float  # by which reading the prefix delayed it
    prefill_s: float
    transfer_s: float  # first token to the last byte of KV at the decode worker
    decode_queue_s: float  # verification, the batch's turn
    decode_s: float  # first step to the last token at the gateway; of a single token only its way

    @property
    def unaccounted_s(self) -> float:
        """What is in no phase: below 0 where workers tell of more time than there was."""
        return self.e2e_s - sum(self.phases().values())

    def phases(self) -> dict[str, float]:
        """Seconds by the phase's name."""
        return {phase: getattr(self, f"{phase}_s") for phase in PHASES}

    def as_json(self) -> dict[str, float]:
        """Everything, in seconds rounded to microseconds."""
        names = ("e2e_s", "ttft_s", *(f"{phase}_s" for phase in PHASES), "unaccounted_s")
        return {name: round(getattr(self, name), 6) for name in names}


@dataclass(slots=True, eq=False, kw_only=True)
class Instants:
    """What the gateway sees of one choice, on its own clock."""

    arrived_at: float
    attempted_at: float  # the last attempt's beginning
    submitted_at: float | None = None  # to the last attempt's prefill worker
    answered_at: float | None = None  # that it has it
    first_at: float | None = None  # the first token of all
    handed_at: float | None = None  # the last attempt's first token
    last_at: float | None = None

    def attempt(self, now: float) -> None:
        """Once more from the beginning."""
        self.attempted_at = now
        self.submitted_at = self.answered_at = self.handed_at = None

    def submitted(self, now: float) -> None:
        """To the prefill worker."""
        self.submitted_at = now

    def answered(self, now: float) -> None:
        """The prefill worker has it; a token may come before one hears of that."""
        self.answered_at = now

    def tokens(self, now: float) -> None:
        """One or more arrived together."""
        if self.first_at is None:
            self.first_at = now
        if self.handed_at is None:
            self.handed_at = now
        self.last_at = now


def ledger(
    at: Instants, prefill: PrefillReport | None, decode: DecodeReport | None
) -> Ledger | None:
    """Of a choice that has ended well; None where it had no token, or nobody told what its prefill took."""
    if prefill is None or at.first_at is None or at.last_at is None or at.submitted_at is None:
        return None
    prefilling_s = prefill.queue_s + prefill.load_s + prefill.compute_s
    landing_s = decode.transfer_s + decode.queue_s if decode is not None else 0.0
    handed_at = at.last_at if at.handed_at is None else at.handed_at
    latest = [handed_at - prefilling_s, at.last_at - prefilling_s - landing_s]
    if at.answered_at is not None:
        latest.append(at.answered_at)
    taken_at = max(at.submitted_at, min(latest))
    return Ledger(
        e2e_s=at.last_at - at.arrived_at,
        ttft_s=at.first_at - at.arrived_at,
        retry_s=at.attempted_at - at.arrived_at,
        gateway_s=taken_at - at.attempted_at,
        queue_s=prefill.queue_s,
        load_s=prefill.load_s,
        prefill_s=prefill.compute_s,
        transfer_s=decode.transfer_s if decode is not None else 0.0,
        decode_queue_s=decode.queue_s if decode is not None else 0.0,
        decode_s=max(0.0, at.last_at - taken_at - prefilling_s - landing_s),
    )
