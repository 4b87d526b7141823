"""`python -m benchmarks.engine.lookahead [--trace FILE]`: compares admission policies in a replay in virtual time.

The policies are on-demand admission (two kinds), reservation for the worst case, and lookahead. They run over the
workers' block pool, on equal requests: random ones, on which every constant was chosen, and with --trace the published
conversation lengths, on which none was. The worker is one decode machine of the Mooncake paper's testbed with the
memory that the table states; it is always contended. `--frontier` varies the parameters: the blocks that on-demand
keeps free, and lookahead's margin. Only the CPU time of admissions and growth is measured (`µs/look`, within a replay);
everything else is deterministic for a seed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine.lookahead.figures import as_table, figures
from benchmarks.engine.lookahead.load import SYNTHETIC, Wish, of_trace, synthetic
from benchmarks.engine.lookahead.replay import Replay, Worker, WorstCase
from benchmarks.measure import write_json
from engine.lookahead.base import OnDemand, Policy
from engine.lookahead.lookahead import Costs, Lookahead
from traces.simulator.profiles import LLAMA3_70B_8XA800

BLOCK_SIZE = 16  # tokens, as vLLM's
ALL_AT_ONCE = 1e9  # requests per second
COSTS = Costs(decode=LLAMA3_70B_8XA800.decode, prefill=LLAMA3_70B_8XA800.prefill)

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "on-demand": partial(OnDemand, per_holder=0),
    "on-demand, a block kept for each": OnDemand,
    "worst case": WorstCase,
    "lookahead": partial(Lookahead, costs=COSTS),
}
KEPT = (0.01, 0.02, 0.05, 0.1)
MARGINS = (0.0, 1.0, 2.0, 2.5, 3.0)
FRONTIER: Mapping[str, Callable[[], Policy]] = {
    **{f"on-demand, {kept:.0%} kept": partial(OnDemand, kept) for kept in KEPT},
    **{f"lookahead, {each:g} σ": partial(Lookahead, margin=each) for each in MARGINS},
    # As in decode workers: until lengths are known, requests are admitted on demand.
    "lookahead, on demand until known": partial(Lookahead, costs=COSTS, until_known=OnDemand()),
}


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, and the size of the pool that they share."""

    name: str
    wishes: Sequence[Wish]
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


def replay(load: Load, policy: Policy) -> dict[str, float]:
    worker = Worker(
        decode=LLAMA3_70B_8XA800.decode,
        prefill=LLAMA3_70B_8XA800.prefill,
        num_blocks=load.pool_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
    )
    run = Replay(load.wishes, worker, policy)
    run.run()
    return figures(run)


def synthetic_loads(count: int, seed: int) -> list[Load]:
    """Returns the synthetic loads. All requests arrive at once, so the next one waits whenever a request ends."""
    return [
        Load(name, synthetic(lengths, count, ALL_AT_ONCE, seed), POOLS[name]) for name, lengths in SYNTHETIC.items()
    ]


def trace_loads(path: Path, limit: int | None, seed: int) -> list[Load]:
    """Returns the trace at its own speed, once per pool size. Only the largest pool can keep up with it."""
    wishes = of_trace(path, limit, seed)
    return [Load(f"conversation, {tokens:,} tokens", wishes, tokens) for tokens in TRACE_POOLS]


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
        print(f"{load.name}: {len(load.wishes):,} requests, {load.pool_tokens:,} tokens\n")
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
