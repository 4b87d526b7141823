"""Record of a placement decision: every candidate with every term, the choice and the outcome.

A record is made for each decided placement, accepted or rejected. It keeps the columns that were weighed, which become
rows only on request. Pure data; knows nothing of instances.
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
    """Prefill instances weighed for one prompt, one row each; never changed. Block counts are of leading blocks of the
    prompt."""

    instance_id: Names
    device_blocks: Ints  # in the device cache
    prefix_blocks: Ints  # in the device cache, continued by the home store node: `prefix_len` of Algorithm 1
    reuse_blocks: Ints  # not computed if the prompt is prefilled here
    load_s: Floats  # from the home store into the device
    transfer_s: Floats  # from the best store of the cluster
    queue_s: Floats
    prefill_s: Floats
    ttft_s: Floats
    added_s: Floats  # total delay of other prompts; 0 if the policy does not compute it
    chosen_at: Ints  # number of the placement that last chose it; 0 = none yet


class DecodeColumns(NamedTuple):
    """Decode instances weighed for one prompt, one row each, with this request added to their load."""

    instance_id: Names
    num_seqs: Floats  # running now, with this request
    context_tokens: Floats  # of these sequences
    landing_seqs: Floats  # running when the prompt lands, with this request
    landing_tokens: Floats
    free_blocks: Ints  # available to new requests, before this one
    needed_blocks: int  # the same for all
    spare_blocks: Floats  # least number free at the predicted instants, with this request's whole answer
    has_slot: Flags  # at most max_num_seqs sequences when it lands, with this request
    tbt_s: Floats  # if it landed now
    landing_tbt_s: Floats  # when it lands
    later_tbt_s: Floats  # in the middle of its answer
    chosen_at: Ints


class UndividedColumns(NamedTuple):
    """Decode instances weighed to prefill the prompt themselves, one row each."""

    instance_id: Names
    device_blocks: Ints  # in the device cache
    reuse_blocks: Ints  # in the device cache, or read from stores
    load_s: Floats  # from the best store of the cluster
    queue_s: Floats  # the rest of the running step, and prompts that it prefills before
    step_s: Floats  # a decode step with this request
    added_s: Floats  # to each step, by this prompt's chunks
    num_steps: Ints
    prefill_s: Floats  # total of these steps, decoding included
    ttft_s: Floats
    keeps_slo: Flags  # the instance has room, and both objectives are met


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Reason of a rejection, and when the request may return."""

    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a placed request, on the gateway's clock."""

    phase: str
    ttft_s: float | None = None
    elapsed_s: float | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    # From the prefill worker's report; None = not reported.
    queue_s: float | None = None
    transfer_s: float | None = None
    prefill_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One placement decision with everything that it was based on."""

    request_id: RequestId
    decided_at: float  # monotonic seconds of the conductor
    policy: str
    balancing_threshold: float | None  # None if the policy has none
    num_prompt_tokens: int
    best_blocks: int  # longest prefix in any store node
    ttft_slo_s: float
    tbt_slo_s: float
    excluded_instances: tuple[str, ...]
    prefill_columns: PrefillColumns
    decode_columns: DecodeColumns
    prefill: str  # the best one, even if the request was rejected
    decode: str
    rank: float  # seconds; prompts wait at the prefill instance in the order of arrival + rank
    turn: Turn  # standing of the tenant, which may have lowered the rank, even below 0
    priority: int  # of the request; lower is more urgent
    sources: tuple[tuple[str, int, int], ...]  # (store, first block, number of blocks)
    predicted_ttft_s: float
    predicted_tbt_s: float
    predicted_landing_wait_s: float  # until the decode instance has blocks for the prompt
    expected_output: float  # tokens, learned from similar finished requests
    admission: str  # which predictions may reject: none, current or predicted
    undivided_columns: UndividedColumns | None = None  # None = no decode instance may prefill
    is_undivided: bool = False  # `decode` also prefills; `prefill` is the best prefill instance, which is not used
    rejection: Rejection | None = None
    outcome: Outcome | None = None

    def to_json(self) -> str:
        """Returns the record as JSON: one object per candidate, everything else under its field name."""
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
