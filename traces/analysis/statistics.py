"""All measures of a trace as one JSON object: FAST'25, table 2 and figure 9, and the distributions behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from traces.analysis.capacity import HitCurve, hit_curve
from traces.analysis.measures import PERCENTS, describe_arrivals, describe_sessions, spread
from traces.analysis.prefixes import Ints, PrefixTree, prefix_tree
from traces.format import TraceRecord

# Figure 9 of the paper has 1k … 50k blocks. The DRAM of one of its machines holds 3M tokens.
CAPACITIES_TOKENS = (
    300_000, 500_000, 1_000_000, 2_000_000, 3_000_000, 5_000_000, 10_000_000, 20_000_000,
    30_000_000, 50_000_000, 100_000_000,
)  # fmt: skip
_RANKS_PER_DECADE = 8


def describe_sharing(tree: PrefixTree, records: Sequence[TraceRecord]) -> dict[str, Any]:
    """Returns popularity by rank, chain lengths, the share of blocks used once, and seconds between uses."""
    ranked = np.sort(tree.uses)[::-1]
    return {
        "num_blocks": tree.num_blocks,
        "used_once_share": float((tree.uses == 1).mean()),
        "popularity": _popularity(ranked),
        "chain_blocks": spread([len(visit.blocks) for visit in tree.visits]),
        "reuse_s": _reuse_seconds(tree, records),
    }


def log_ranks(count: int) -> list[int]:
    """Returns ranks from 1 to `count`, evenly spaced in the logarithm."""
    decades = np.log10(max(count, 1))
    points = 10 ** np.linspace(0, decades, int(decades * _RANKS_PER_DECADE) + 1)
    return sorted({min(count, round(float(point))) for point in points}) if count else []


def _popularity(ranked: Ints) -> list[dict[str, int]]:
    return [{"rank": rank, "uses": int(ranked[rank - 1])} for rank in log_ranks(len(ranked))]


def _reuse_seconds(tree: PrefixTree, records: Sequence[TraceRecord]) -> dict[str, float | None]:
    """Returns the spread of the seconds between two uses of a block, over all reuses."""
    gaps = [
        (record.arrived_s - records[run.last_request].arrived_s, run.length)
        for record, visit in zip(records, tree.visits, strict=True)
        for run in visit.runs
    ]
    return spread([gap for gap, _ in gaps], [length for _, length in gaps])


def analyze(
    records: Sequence[TraceRecord],
    *,
    window_s: float = 60.0,
    capacities_tokens: Sequence[int] = CAPACITIES_TOKENS,
) -> dict[str, Any]:
    """Returns the statistics of at least one record. Ratios are shares of prompt tokens and count full blocks only.

    `cache_ratio`: hit ratio of an unlimited cache, equal to the `ideal_hit_ratio` of a replay.
    """
    tree = prefix_tree(records)
    inputs = [record.input_length for record in records]
    outputs = [record.output_length for record in records]
    curve = hit_curve(tree, input_tokens=sum(inputs), tokens_per_block=records[0].tokens_per_hash)
    return {
        "num_requests": len(records),
        "total_input_tokens": sum(inputs),
        "total_output_tokens": sum(outputs),
        "cache_ratio": curve.ratio(None),
        "input_length": spread(inputs),
        "output_length": spread(outputs),
        "arrivals": describe_arrivals([record.arrived_s for record in records], window_s),
        "prefixes": describe_sharing(tree, records),
        "lru": _lru(curve, capacities_tokens),
        "sessions": describe_sessions(tree, records),
    }


def _lru(curve: HitCurve, capacities_tokens: Sequence[int]) -> dict[str, Any]:
    points = [{"capacity_tokens": capacity, "hit_ratio": curve.ratio(capacity)} for capacity in capacities_tokens]
    distances = {f"p{percent}": curve.distance_percentile(percent) for percent in PERCENTS}
    return {
        "curve": [*points, {"capacity_tokens": None, "hit_ratio": curve.ratio(None)}],
        "reuse_distance_tokens": distances,
    }
