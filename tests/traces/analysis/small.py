"""Small random traces for tests: paths in a tree, so that a hash id commits to the ids before it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from traces.format import TOKENS_PER_HASH, TraceRecord


def records_of(paths: Sequence[Sequence[int]], *, short: int = 0, gap_s: float = 1.0) -> list[TraceRecord]:
    """One request per path of branch numbers, `gap_s` apart, each `short` tokens less than whole blocks."""
    ids: dict[tuple[int, ...], int] = {}
    return [
        TraceRecord(
            arrived_s=index * gap_s,
            input_length=len(path) * TOKENS_PER_HASH - short,
            output_length=10,
            hash_ids=tuple(ids.setdefault(tuple(path[: depth + 1]), len(ids)) for depth in range(len(path))),
        )
        for index, path in enumerate(paths)
    ]


def trees() -> st.SearchStrategy[list[list[int]]]:
    """Paths that share a lot."""
    return st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=60)
