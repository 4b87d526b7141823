"""What a replay came to: one row of figures, the same for every policy, and rows as a table.

`utilisation`: tokens held ÷ tokens that the tables have room for. `pool`: tokens held ÷ tokens that the pool has room
for. `runs`: of neighbouring blocks, per table. These are means over the time in which somebody ran. `reallocations`:
tables that grew and could not go on behind their last block, per 1,000 tokens, as calls are. Waiting is all the time in
which a request held nothing, preemptions included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.engine.lookahead.replay import Replay
from benchmarks.measure import table
from protocol.timeline import percentile

HEADERS = (
    "policy", "tokens/s", "preemptions", "recomputed, %", "utilisation, %", "pool, %", "sequences", "runs",
    "reallocations /1,000", "calls /1,000", "waiting p50, s", "p90", "p99", "µs/call",
)  # fmt: skip


def figures(replay: Replay) -> dict[str, float]:
    """Of one that has run."""
    sums, counters = replay.sums, replay.allocator.counters
    waits = [sequence.waited_s for sequence in replay.ended]
    pool_tokens = replay.allocator.num_blocks * replay.allocator.block_size
    return {
        "tokens_per_s": sums.generated / replay.now_s,
        "preemptions": float(counters.preemptions),
        "recomputed_tokens": float(sums.recomputed),
        "recomputed_share": sums.recomputed / sums.generated,
        "utilisation": sums.tokens / sums.capacity,
        "pool_utilisation": sums.tokens / (sums.busy_s * pool_tokens),
        "sequences": sums.sequences / sums.busy_s,
        "runs": sums.runs / sums.sequences,
        "reallocations": counters.reallocations / sums.generated * 1e3,
        "calls": counters.calls / sums.generated * 1e3,
        "blocks_taken_back": float(counters.blocks_taken_back),
        **{f"waiting_p{p}_s": percentile(waits, p) for p in (50, 90, 99)},
        "us_per_call": replay.allocator_s / counters.calls * 1e6,
        "makespan_s": replay.now_s,
        "generated_tokens": float(sums.generated),
    }


def as_table(rows: Sequence[tuple[str, dict[str, float]]]) -> str:
    return table(HEADERS, [[name, *_cells(row)] for name, row in rows])


def _cells(row: dict[str, float]) -> list[Any]:
    return [
        f"{row['tokens_per_s']:,.1f}",
        f"{row['preemptions']:,.0f}",
        *(f"{row[name] * 100:.1f}" for name in ("recomputed_share", "utilisation", "pool_utilisation")),
        *(f"{row[name]:.1f}" for name in ("sequences", "runs", "reallocations", "calls")),
        *(f"{row[f'waiting_p{p}_s']:,.0f}" for p in (50, 90, 99)),
        f"{row['us_per_call']:.0f}",
    ]  # fmt: skip
