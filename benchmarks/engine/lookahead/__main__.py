"""`python -m benchmarks.engine.lookahead [--trace FILE]`: compares admission policies in a replay in virtual time.

The policies are on-demand admission (two kinds), reservation for the worst case, and lookahead. They run over the
workers' block pool, on equal requests: random ones, on which every constant was chosen, and with --trace the published
conversation lengths, on which none was. The worker is one decode machine of the Mooncake paper's testbed with the
memory that the table states; it is always contended. `--frontier` varies the parameters: the blocks that on-demand
keeps free, and lookahead's margin. Only the CPU time of admissions and growth is measured (`µs/look`, within a replay);
everything else is deterministic for a seed.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine.lookahead.replay import Replay, Worker, WorstCase
from benchmarks.engine.lookahead.requests import SYNTHETIC, LoadRequest, synthetic_requests, trace_requests
from benchmarks.harness.measure import table, write_json
from moonserve.engine.admission_policy import AdmissionPolicy, OnDemandPolicy
from moonserve.engine.lookahead_policy import LookaheadPolicy, PreemptionCosts
from moonserve.protocol.latency import percentile
from moonserve.traces.simulator.model_profiles import LLAMA3_70B_8XA800

# Computes the figures of a replay, one row per policy, and formats rows as a table.
#
# `pool`: tokens held ÷ capacity of the pool in tokens, the mean over the time in which requests ran. Waiting: the
# total time in which a request held no blocks, also after preemptions. `µs/look`: processor time per attempt to admit.

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


BLOCK_SIZE = 16  # tokens, as vLLM's
ALL_AT_ONCE = 1e9  # requests per second
COSTS = PreemptionCosts(decode=LLAMA3_70B_8XA800.decode, prefill=LLAMA3_70B_8XA800.prefill)

POLICIES: Mapping[str, Callable[[], AdmissionPolicy]] = {
    "on-demand": partial(OnDemandPolicy, per_holder=0),
    "on-demand, a block kept for each": OnDemandPolicy,
    "worst case": WorstCase,
    "lookahead": partial(LookaheadPolicy, costs=COSTS),
}
KEPT = (0.01, 0.02, 0.05, 0.1)
MARGINS = (0.0, 1.0, 2.0, 2.5, 3.0)
FRONTIER: Mapping[str, Callable[[], AdmissionPolicy]] = {
    **{f"on-demand, {kept:.0%} kept": partial(OnDemandPolicy, kept) for kept in KEPT},
    **{f"lookahead, {each:g} σ": partial(LookaheadPolicy, margin=each) for each in MARGINS},
    # As in decode workers: until lengths are known, requests are admitted on demand.
    "lookahead, on demand until known": partial(LookaheadPolicy, costs=COSTS, until_known=OnDemandPolicy()),
}


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, and the size of the pool that they share."""

    name: str
    requests: Sequence[LoadRequest]
    pool_tokens: int


# Sizes in tokens, with room for some dozens to some hundreds of sequences.
POOLS = {
    "chat": 200_000,
    "documents": 700_000,
    "reasoning": 200_000,
    "drifting": 100_000,
    "tenants": 200_000,
}
TRACE_POOLS = (340_000, 690_000, LLAMA3_70B_8XA800.device_tokens)


def replay(load: Load, policy: AdmissionPolicy) -> dict[str, float]:
    worker = Worker(
        decode=LLAMA3_70B_8XA800.decode,
        prefill=LLAMA3_70B_8XA800.prefill,
        num_blocks=load.pool_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
    )
    run = Replay(load.requests, worker, policy)
    run.run()
    return figures(run)


def synthetic_loads(count: int, seed: int) -> list[Load]:
    """Returns the synthetic loads. All requests arrive at once, so the next one waits whenever a request ends."""
    return [
        Load(name, synthetic_requests(lengths, count, ALL_AT_ONCE, seed), POOLS[name])
        for name, lengths in SYNTHETIC.items()
    ]


def trace_loads(path: Path, limit: int | None, seed: int) -> list[Load]:
    """Returns the trace at its own speed, once per pool size. Only the largest pool can keep up with it."""
    requests = trace_requests(path, limit, seed)
    return [Load(f"conversation, {tokens:,} tokens", requests, tokens) for tokens in TRACE_POOLS]


def verdict(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Compares lookahead with each other policy. It dominates if it has fewer preemptions than on-demand allocation at
    no less throughput, and more throughput than the worst case. On-demand with a block kept for each sequence, as in
    our workers, goes beyond plain on-demand allocation: it has a line, but does not count for dominance."""
    ours = rows["lookahead"]
    lines = [
        f"lookahead ÷ {name}: {ours['tokens_per_s'] / rows[name]['tokens_per_s']:.3f} tokens/s"
        f", preemptions {rows[name]['preemptions']:.0f} → {ours['preemptions']:.0f}"
        for name in POLICIES
        if name != "lookahead"
    ]
    return "\n".join([*lines, f"dominates: {'yes' if dominates(rows) else 'NO'}"])


def dominates(rows: Mapping[str, Mapping[str, float]]) -> bool:
    ours, on_demand, worst = rows["lookahead"], rows["on-demand"], rows["worst case"]
    return (
        ours["tokens_per_s"] >= on_demand["tokens_per_s"]
        and ours["preemptions"] < on_demand["preemptions"]
        and ours["tokens_per_s"] > worst["tokens_per_s"]
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    loads = synthetic_loads(arguments.requests, arguments.seed)
    if arguments.trace is not None:
        loads += trace_loads(arguments.trace, arguments.limit, arguments.seed)
    policies = {**POLICIES, **(FRONTIER if arguments.frontier else {})}
    result: dict[str, Any] = {}
    for load in loads:
        rows = {name: replay(load, make()) for name, make in policies.items()}
        result[load.name] = {"pool_tokens": load.pool_tokens, "rows": rows}
        print(f"{load.name}: {len(load.requests):,} requests, {load.pool_tokens:,} tokens\n")
        print(as_table(list(rows.items())), verdict(rows), sep="\n\n", end="\n\n", flush=True)
        write_json(arguments.output, result)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="the conversation trace")
    parser.add_argument("--limit", type=int, help="its first requests only")
    parser.add_argument("--requests", type=int, default=4000, help="of each drawn load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frontier", action="store_true", help="other knobs, too")
    parser.add_argument("--output", type=Path, default=Path("out/engine/lookahead.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
