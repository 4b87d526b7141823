"""Record of a placement decision (every candidate with every term, the choice, the outcome), and the bounded log of the
latest ones. Pure.

A record is made for each placement, accepted or rejected. It keeps the columns that were weighed, which become rows
only on request. It knows nothing of instances.
"""

import json
from collections import OrderedDict
from dataclasses import asdict, dataclass, fields, replace
from itertools import repeat
from typing import Any, NamedTuple

from moonserve.conductor.placement.tenant_fairness import TenantStanding
from moonserve.conductor.prediction.instance_table import Flags, Floats, Ints, Names
from moonserve.protocol.request import RequestId


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


class LocalPrefillColumns(NamedTuple):
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
    num_draft_tokens: int = 0  # guessed by speculative decoding and computed
    num_accepted_tokens: int = 0  # of these, tokens that were right
    # From the prefill worker's report; None = not reported.
    queue_s: float | None = None
    transfer_s: float | None = None
    prefill_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One placement decision with everything that it was based on."""

    request_id: RequestId
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
    turn: TenantStanding  # standing of the tenant, which may have lowered the rank, even below 0
    priority: int  # of the request; lower is more urgent
    expected_return: str  # when the session's next request is expected, and by whose hint; "" = there is none
    sources: tuple[tuple[str, int, int], ...]  # (store, first block, number of blocks)
    predicted_ttft_s: float
    predicted_tbt_s: float
    predicted_landing_wait_s: float  # until the decode instance has blocks for the prompt
    expected_output: float  # tokens, learned from similar finished requests
    # Intervals that are to contain `INTERVAL_SHARE` of the actual values; None = too few are known.
    tbt_range_s: tuple[float, float] | None
    output_range: tuple[int, int] | None
    admission: str  # which predictions may reject: none, current or predicted
    undivided_columns: LocalPrefillColumns | None = None  # None = no decode instance may prefill
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
    columns: PrefillColumns | DecodeColumns | LocalPrefillColumns | None,
) -> list[dict[str, Any]]:
    if columns is None:
        return []
    values = (repeat(c) if isinstance(c, int) else c.tolist() for c in columns)
    return [dict(zip(columns._fields, row, strict=True)) for row in zip(*values, strict=False)]


# Measured by tracemalloc: a decision without rows (record, 15 empty arrays, log entry), and the numbers of one row.
_RECORD_BYTES = 3_500
_PREFILL_ROW_BYTES = 10 * 8
_DECODE_ROW_BYTES = 10 * 8 + 1


@dataclass(slots=True, eq=False)
class _Entry:
    decision: Decision
    num_bytes: int
    name: str  # the client's name for the request; "" = its id
    # Not in the decision, because copying a decision costs more than deciding.
    outcome: Outcome | None = None


class DecisionLog:
    """Keeps the latest decisions, one per request, and drops the oldest ones. Bounded in number and in bytes."""

    def __init__(self, capacity: int, max_bytes: int) -> None:
        self.capacity = capacity
        self._max_bytes = max_bytes
        self._entries: OrderedDict[RequestId, _Entry] = OrderedDict()
        self._named: dict[str, RequestId] = {}  # latest request of each name
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def record(self, decision: Decision, name: str = "") -> None:
        """Adds a decision, which replaces an earlier one for the same request. The newest decision is always kept.

        `name`: the client's name for the request. Clients may reuse names; the latest request counts.
        """
        superseded = self._entries.pop(decision.request_id, None)
        if superseded is not None:
            self._forget(superseded)
        entry = _Entry(decision, _size(decision) + len(name), name)
        self._entries[decision.request_id] = entry
        self.num_bytes += entry.num_bytes
        if name:
            self._named[name] = decision.request_id
        entries = self._entries
        while len(entries) > self.capacity or (self.num_bytes > self._max_bytes and len(entries) > 1):
            self._forget(entries.popitem(last=False)[1])

    def _forget(self, entry: _Entry) -> None:
        self.num_bytes -= entry.num_bytes
        if self._named.get(entry.name) == entry.decision.request_id:
            del self._named[entry.name]

    def find(self, known_id: str) -> Decision | None:
        """Returns the decision with its outcome, by request id or else by name; None if there is none."""
        request_id = RequestId(known_id)
        entry = self._entries.get(request_id)
        if entry is None:  # ids first, since clients choose names freely
            entry = self._entries.get(self._named.get(known_id, request_id))
        return None if entry is None else replace(entry.decision, outcome=entry.outcome)

    def conclude(self, request_id: RequestId, outcome: Outcome) -> None:
        """Adds an outcome to the decision of a request. Unknown ids are ignored."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.outcome = outcome if entry.outcome is None else _after(entry.outcome, outcome)

    def validate(self) -> None:
        entries = self._entries
        assert len(entries) <= self.capacity
        assert len(entries) <= 1 or self.num_bytes <= self._max_bytes
        assert self.num_bytes == sum(entry.num_bytes for entry in entries.values())
        assert all(key == entry.decision.request_id for key, entry in entries.items())
        assert all(entries[id].name == name for name, id in self._named.items())


def _after(earlier: Outcome, outcome: Outcome) -> Outcome:
    """Merges two outcomes: the report of an end does not repeat the TTFT terms of the first token's report."""
    if outcome.prefill_s is not None:
        return outcome
    return replace(
        outcome,
        queue_s=earlier.queue_s,
        transfer_s=earlier.transfer_s,
        prefill_s=earlier.prefill_s,
    )


def _size(decision: Decision) -> int:
    """Returns the approximate memory of a decision in bytes. Names of instances are shared between decisions."""
    prefills, decodes = decision.prefill_columns, decision.decode_columns
    return (
        _RECORD_BYTES
        + len(prefills.ttft_s) * _PREFILL_ROW_BYTES
        + len(decodes.tbt_s) * _DECODE_ROW_BYTES
        + (0 if decision.undivided_columns is None else len(decodes.tbt_s) * _DECODE_ROW_BYTES)
    )
