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


class PrefillColumns(NamedTuple):
    """Prefill instances weighed for one prompt, a row each; nobody changes them any more. Block counts are of leading
    blocks of the prompt."""

    instance_id: Names
    device_blocks: Ints  # in its device cache
    prefix_blocks: Ints  # there, continued by its home store node: `prefix_len` of Algorithm 1
    reuse_blocks: Ints  # would be used here
    load_s: Floats  # from the home store into the device
    transfer_s: Floats  # from the best store of the cluster
    queue_s: Floats
    prefill_s: Floats
    ttft_s: Floats
    added_s: Floats  # by which others would wait longer, together; 0 where the policy does not ask
    chosen_at: Ints  # number of the placement that last went here; 0 = none yet


class DecodeColumns(NamedTuple):
    """Decode instances with this request added to what runs there or is on its way, likewise."""

    instance_id: Names
    num_seqs: Floats  # that run now, as far as known
    context_tokens: Floats  # theirs
    landing_seqs: Floats  # that will run when the prompt is prefilled
    landing_tokens: Floats
    free_blocks: Ints  # left for new requests, before this one
    needed_blocks: int  # the same for all
    spare_blocks: Floats  # left at the worst of what is foreseen, with this request's whole answer
    has_slot: Flags  # fewer than max_num_seqs sequences when it lands
    tbt_s: Floats  # if it landed now
    landing_tbt_s: Floats  # when it lands
    later_tbt_s: Floats  # in the middle of its answer
    chosen_at: Ints


class UndividedColumns(NamedTuple):
    """Decode instances that would prefill the prompt themselves, likewise."""

    instance_id: Names
    device_blocks: Ints  # in its device cache
    reuse_blocks: Ints  # there, or read from stores
    load_s: Floats  # from the best store of the cluster
    queue_s: Floats  # the step under way, and prompts that it reads before
    step_s: Floats  # of those who decode, this request among them
    added_s: Floats  # to each of its steps, by this prompt's chunks
    num_steps: Ints
    prefill_s: Floats  # of these steps, decoding included
    ttft_s: Floats
    keeps_slo: Flags  # it has room, and both objectives are kept


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
    rejection: Rejection | None = None
    outcome: Outcome | None = None

    def to_json(self) -> str:
        """A row for each candidate, and everything else as it is named here."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        record["turn"] = {**self.turn._asdict(), "ahead_tokens": self.turn.ahead_tokens}
        for name in ("rejection", "outcome"):
            record[name] = None if record[name] is None else asdict(record[name])
        for role in ("prefill", "decode", "undivided"):
            record[f"{role}_candidates"] = _rows(record.pop(f"{role}_columns"))
        for row in record["decode_candidates"]:
            row["fits"] = row["free_blocks"] >= row["needed_blocks"]
        return json.dumps(record)


def _rows(
    columns: PrefillColumns | DecodeColumns | UndividedColumns | None,
) -> list[dict[str, Any]]:
    if columns is None:
        return []
    values = (repeat(c) if isinstance(c, int) else c.tolist() for c in columns)
    return [dict(zip(columns._fields, row, strict=True)) for row in zip(*values, strict=False)]
