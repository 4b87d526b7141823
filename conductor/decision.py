"""The record of a decision: every candidate with every term, what was chosen, and what then happened.

A record is made for each placement that was decided, accepted or rejected. It keeps the columns that were weighed;
rows are made of them when somebody asks. Pure data; it knows nothing of instances.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from itertools import repeat
from typing import Any, NamedTuple

from conductor.columns import Flags, Floats, Ints, Names
from conductor.fairness.shares import Turn
from protocol.ids import RequestId


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
    added_s: float  # by which others would wait longer, together; 0 where the policy does not ask
    chosen_at: int  # number of the placement that last went here; 0 = none yet


class DecodeCandidate(NamedTuple):
    """One decode instance with this request added to what runs there or is on its way."""

    instance_id: str
    num_seqs: float  # that run now, as far as known
    context_tokens: float  # theirs
    landing_seqs: float  # that will run when the prompt is prefilled
    landing_tokens: float
    free_blocks: int  # left for new requests, before this one
    needed_blocks: int
    spare_blocks: float  # left at the worst of what is foreseen, with this request's whole answer
    has_slot: bool  # fewer than max_num_seqs sequences when it lands
    tbt_s: float  # if it landed now
    landing_tbt_s: float  # when it lands
    later_tbt_s: float  # in the middle of its answer
    chosen_at: int

    @property
    def fits(self) -> bool:
        return self.free_blocks >= self.needed_blocks


class PrefillColumns(NamedTuple):
    """Fields of `PrefillCandidate`, a row per candidate; nobody changes them any more."""

    instance_id: Names
    device_blocks: Ints
    prefix_blocks: Ints
    reuse_blocks: Ints
    load_s: Floats
    transfer_s: Floats
    queue_s: Floats
    prefill_s: Floats
    ttft_s: Floats
    added_s: Floats
    chosen_at: Ints

    def rows(self) -> tuple[PrefillCandidate, ...]:
        return tuple(map(PrefillCandidate, *(column.tolist() for column in self)))


class DecodeColumns(NamedTuple):
    """Fields of `DecodeCandidate`, likewise."""

    instance_id: Names
    num_seqs: Floats
    context_tokens: Floats
    landing_seqs: Floats
    landing_tokens: Floats
    free_blocks: Ints
    needed_blocks: int  # the same for all
    spare_blocks: Floats
    has_slot: Flags
    tbt_s: Floats
    landing_tbt_s: Floats
    later_tbt_s: Floats
    chosen_at: Ints

    def rows(self) -> tuple[DecodeCandidate, ...]:
        columns = (c if isinstance(c, int) else c.tolist() for c in self)
        each = (repeat(c) if isinstance(c, int) else c for c in columns)
        return tuple(DecodeCandidate(*row) for row in zip(*each, strict=False))


class UndividedCandidate(NamedTuple):
    """One decode instance that would prefill the prompt itself. Block counts are of leading blocks of the prompt."""

    instance_id: str
    device_blocks: int  # in its device cache
    reuse_blocks: int  # there, or read from stores
    load_s: float  # from the best store of the cluster
    queue_s: float  # the step under way, and prompts that it reads before
    step_s: float  # of those who decode, this request among them
    added_s: float  # to each of its steps, by this prompt's chunks
    num_steps: int
    prefill_s: float  # of these steps, decoding included
    ttft_s: float
    keeps_slo: bool  # it has room, and both objectives are kept


class UndividedColumns(NamedTuple):
    """Fields of `UndividedCandidate`, a row per candidate; nobody changes them any more."""

    instance_id: Names
    device_blocks: Ints
    reuse_blocks: Ints
    load_s: Floats
    queue_s: Floats
    step_s: Floats
    added_s: Floats
    num_steps: Ints
    prefill_s: Floats
    ttft_s: Floats
    keeps_slo: Flags

    def rows(self) -> tuple[UndividedCandidate, ...]:
        return tuple(map(UndividedCandidate, *(column.tolist() for column in self)))


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
    # The prefill worker's report, as far as it was told.
    queue_s: float | None = None
    transfer_s: float | None = None
    prefill_s: float | None = None


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
    prefill_columns: PrefillColumns
    decode_columns: DecodeColumns
    prefill: str  # the best one, also when it was not good enough
    decode: str
    # Seconds; prompts wait at the prefill instance in the order of their arrival + rank.
    rank: float
    turn: Turn  # its tenant's, which may have made the rank lower, also below 0
    priority: int  # of the request; lower is more urgent
    sources: tuple[tuple[str, int, int], ...]  # (store, first block, number of blocks)
    predicted_ttft_s: float
    predicted_tbt_s: float
    predicted_landing_wait_s: float  # until the decode instance has blocks for the prompt
    expected_output: float  # tokens, from what finished requests alike produced
    admission: str  # whose predictions may reject: none, current or predicted
    undivided_columns: UndividedColumns | None = None  # None: no decode instance may prefill
    is_undivided: bool = False  # `decode` prefills, `prefill` would have been the best one to do it
    replica_blocks: int = 0  # of `sources`, those that stores copied from each other to be near
    rejection: Rejection | None = None
    outcome: Outcome | None = None

    @property
    def prefill_candidates(self) -> tuple[PrefillCandidate, ...]:
        return self.prefill_columns.rows()

    @property
    def decode_candidates(self) -> tuple[DecodeCandidate, ...]:
        return self.decode_columns.rows()

    def to_json(self) -> str:
        record: dict[str, Any] = {}
        for name in (field.name for field in fields(self)):
            if name == "undivided_columns":
                record["undivided_candidates"] = _dicts(self.undivided_columns)
                continue
            match getattr(self, name):
                case PrefillColumns() as columns:
                    record["prefill_candidates"] = [c._asdict() for c in columns.rows()]
                case DecodeColumns() as columns:
                    record["decode_candidates"] = [
                        {**c._asdict(), "fits": c.fits} for c in columns.rows()
                    ]
                case Turn() as turn:
                    record[name] = {**turn._asdict(), "ahead_tokens": turn.ahead_tokens}
                case Rejection() | Outcome() as part:
                    record[name] = asdict(part)
                case value:
                    record[name] = value
        return json.dumps(record)


def _dicts(undivided: UndividedColumns | None) -> list[dict[str, Any]]:
    return [] if undivided is None else [each._asdict() for each in undivided.rows()]
