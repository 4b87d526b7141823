"""Log of the most recent decisions, one per request, bounded in number and in bytes. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from conductor.decision import Decision, Outcome
from protocol.ids import RequestId

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
    """Keeps the latest decisions and drops the oldest ones."""

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
