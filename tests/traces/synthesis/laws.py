"""What every trace must obey, whoever made it (the public format)."""

from __future__ import annotations

from collections.abc import Sequence

from traces.format import TOKENS_PER_HASH, TraceRecord


def check_laws(records: Sequence[TraceRecord]) -> None:
    """Sorted, as many ids as the length needs, one parent and one fill per id, ids dense as they appear."""
    parents: dict[int, int | None] = {}
    fills: dict[int, int] = {}
    earlier_s = 0.0
    for record in records:
        assert record.arrived_s >= earlier_s
        earlier_s = record.arrived_s
        assert record.output_length >= 1
        assert len(record.hash_ids) == -(-record.input_length // TOKENS_PER_HASH)
        parent: int | None = None
        left = record.input_length
        for hash_id in record.hash_ids:
            assert hash_id <= len(parents)  # a new id is the next one
            assert parents.setdefault(hash_id, parent) == parent
            fill = min(left, TOKENS_PER_HASH)
            assert fills.setdefault(hash_id, fill) == fill
            parent, left = hash_id, left - fill
