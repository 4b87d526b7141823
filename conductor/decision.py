"""The record of a decision: every candidate with every term, what was chosen, and what then happened.

A record is made for each placement that was decided, accepted or rejected. Pure data; it knows nothing of instances.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from protocol.ids import RequestId


# Tuples and not dataclasses: one of each per instance and request is made, and a frozen dataclass costs three times
# as much to build.
class PrefillCandidate(NamedTuple):
    """One prefill instance, weighed for one prompt. Block counts are of leading blocks of the prompt."""

    instance_id: str
    device_blocks: int  # in its device cache
    prefix_blocks: int  # there, continued by its home store node: `prefix_len` of Algorithm 1
    reuse_blocks: int  # would be used here
    load_s: float  # from the home store into the device
    transfer_s: float  # from the best store of the cluster
    queue_s: float
    prefill_s: float
    ttft_s: float
    chosen_at: int  # number of the placement that last went here; 0 = none yet


class DecodeCandidate(NamedTuple):
    """One decode instance with this request added to what runs there or is on its way."""

    instance_id: str
    num_seqs: int
    context_tokens: int
    free_blocks: int  # left for new requests, before this one
    needed_blocks: int
    has_slot: bool  # fewer than max_num_seqs sequences
    tbt_s: float
    chosen_at: int

    @property
    def fits(self) -> bool:
        return self.free_blocks >= self.needed_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why a request was turned away, and when it may come back."""

    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happened to a placed request, on the gateway's clock."""

    phase: str
    ttft_s: float | None = None
    elapsed_s: float | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Why one request went where it went."""

    request_id: RequestId
    decided_at: float  # monotonic seconds of the conductor
    policy: str
    balancing_threshold: float | None  # None: the policy has none
    num_prompt_tokens: int
    best_blocks: int  # longest prefix in any store node
    ttft_slo_s: float
    tbt_slo_s: float
    excluded_instances: tuple[str, ...]
    prefill_candidates: tuple[PrefillCandidate, ...]
    decode_candidates: tuple[DecodeCandidate, ...]
    prefill: str  # the best one, also when it was not good enough
    decode: str
    sources: tuple[tuple[str, int, int], ...]  # (store, first block, number of blocks)
    predicted_ttft_s: float
    predicted_tbt_s: float
    predicted_landing_wait_s: float  # until the decode instance has blocks for the prompt
    rejection: Rejection | None = None
    outcome: Outcome | None = None

    def to_json(self) -> str:
        record = asdict(self)
        record["prefill_candidates"] = [c._asdict() for c in self.prefill_candidates]
        record["decode_candidates"] = [
            {**c._asdict(), "fits": c.fits} for c in self.decode_candidates
        ]
        return json.dumps(record)


class DecisionLog:
    """The most recent decisions, one per request: a ring of `capacity`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._decisions: OrderedDict[RequestId, Decision] = OrderedDict()

    def __len__(self) -> int:
        return len(self._decisions)

    def record(self, decision: Decision) -> None:
        """Adds a decision; it supersedes an earlier one for the same request."""
        self._decisions.pop(decision.request_id, None)
        self._decisions[decision.request_id] = decision
        if len(self._decisions) > self._capacity:
            self._decisions.popitem(last=False)

    def find(self, request_id: RequestId) -> Decision | None:
        return self._decisions.get(request_id)

    def conclude(self, request_id: RequestId, outcome: Outcome) -> None:
        """Adds what happened; a decision that has left the ring stays forgotten."""
        decision = self._decisions.get(request_id)
        if decision is not None:
            self._decisions[request_id] = replace(decision, outcome=outcome)

    def validate(self) -> None:
        assert len(self._decisions) <= self._capacity
        assert all(key == decision.request_id for key, decision in self._decisions.items())
