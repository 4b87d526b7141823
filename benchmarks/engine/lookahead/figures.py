"""Computes the figures of a replay, one row per policy, and formats rows as a table.

`pool`: tokens held ÷ capacity of the pool in tokens, the mean over the time in which requests ran. Waiting: the total
time in which a request held no blocks, also after preemptions. `µs/look`: processor time per attempt to admit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.engine.lookahead.replay import Replay
from benchmarks.measure import table
from protocol.timeline import percentile

HEADERS = (
    "policy", "tokens/s", "preemptions", "recomputed, %", "pool, %", "sequences", "waiting p50, s", "p90", "p99",
    "µs/look",
)  # fmt: skip


def figures(replay: Replay) -> dict[str, float]:
    """Returns the figures of a finished replay."""
    sums, tables = replay.sums, replay.tables
    waits = [sequence.waited_s for sequence in replay.ended]
    pool_tokens = tables.pool.num_blocks * tables.block_size
    return {
        "tokens_per_s": sums.generated / replay.now_s,
        "preemptions": float(tables.num_preemptions),
        "recomputed_tokens": float(sums.recomputed),
        "recomputed_share": sums.recomputed / sums.generated,
        "pool_utilisation": sums.tokens / (sums.busy_s * pool_tokens),
        "sequences": sums.sequences / sums.busy_s,
        **{f"waiting_p{p}_s": percentile(waits, p) for p in (50, 90, 99)},
        "us_per_look": replay.tables_s / tables.num_looks * 1e6,
        "makespan_s": replay.now_s,
        "generated_tokens": float(sums.generated),
    }


def as_table(rows: Sequence[tuple[str, dict[str, float]]]) -> str:
    return table(HEADERS, [[name, *_cells(row)] for name, row in rows])


def _cells(row: dict[str, float]) -> list[Any]:
    return [
        f"{row['tokens_per_s']:,.1f}",
        f"{row['preemptions']:,.0f}",
        *(f"{row[name] * 100:.1f}" for name in ("recomputed_share", "pool_utilisation")),
        f"{row['sequences']:.1f}",
        *(f"{row[f'waiting_p{p}_s']:,.0f}" for p in (50, 90, 99)),
        f"{row['us_per_look']:.0f}",
    ]  # fmt: skip
