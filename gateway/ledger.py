"""Where one request's time went, phase by phase, each measured on the clock of one host. Pure.

    |-- gateway --|-- queue, load, prefill --|-- transfer --|-- decode queue --|-- decode --|
    arrival    accepted by prefill      first token                                  last token

The prefill worker measures its own phases until the first token, and the way of the KV from there to the handoff; the
decode worker the wait for its first step; the gateway everything else. No instants of two hosts meet: the first
token's way to the gateway is in no phase, and `unaccounted_s` says how much that is.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.request import DecodeReport, PrefillReport

PHASES = ("retry", "gateway", "queue", "load", "prefill", "transfer", "decode_queue", "decode")
"""In their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Seconds of one choice; of several attempts the last one's, with those before it as `retry_s`."""

    e2e_s: float  # arrival at the gateway to the last token there
    ttft_s: float  # arrival to the first token that the client got
    retry_s: float  # until the last attempt began
    gateway_s: float  # placing, until the prefill worker had taken it
    queue_s: float  # at the prefill worker, for landing blocks and for the engine
    load_s: float  # by which reading the prefix delayed it
    prefill_s: float
    transfer_s: float  # first token to the last byte of KV at the decode worker
    decode_queue_s: float  # verification, the batch's turn
    decode_s: float  # first step to the last token at the gateway

    @property
    def unaccounted_s(self) -> float:
        """What is in no phase; below 0 where phases overlap."""
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
    accepted_at: float | None = None  # by the last attempt's prefill worker
    first_at: float | None = None  # the first token of all
    handed_at: float | None = None  # the last attempt's first token
    last_at: float | None = None

    def attempt(self, now: float) -> None:
        """Once more from the beginning."""
        self.attempted_at = now
        self.accepted_at = self.handed_at = None

    def submitted(self, now: float) -> None:
        """To the prefill worker, or taken by it; a token may come before one hears of that."""
        if self.accepted_at is None or self.handed_at is None:
            self.accepted_at = now

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
    if prefill is None or at.first_at is None or at.last_at is None or at.accepted_at is None:
        return None
    handed_at = at.last_at if at.handed_at is None else at.handed_at
    transfer_s = decode.transfer_s if decode is not None else 0.0
    queue_s = decode.queue_s if decode is not None else 0.0
    return Ledger(
        e2e_s=at.last_at - at.arrived_at,
        ttft_s=at.first_at - at.arrived_at,
        retry_s=at.attempted_at - at.arrived_at,
        gateway_s=at.accepted_at - at.attempted_at,
        queue_s=prefill.queue_s,
        load_s=prefill.load_s,
        prefill_s=prefill.compute_s,
        transfer_s=transfer_s,
        decode_queue_s=queue_s,
        decode_s=max(0.0, at.last_at - handed_at - transfer_s - queue_s),
    )
