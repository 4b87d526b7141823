"""Measures the conductor's placements per second and their latency, by number of instances and of indexed blocks.

`ConductorState.handle` processes a script of events in virtual time on one core: placements as a Poisson process, for
each of them the reports of its first token and of its end, and a heartbeat per second of every instance with load and
block changes. Half of the instances prefill, half decode, and every prefill instance has a store node on its host.
Prompts have 128 blocks and one token: the leading blocks of an indexed chain (8 of them common to all chains), then
new blocks. `told` is the number of new blocks that each placed prompt adds to its instance's device cache and store,
with as many evictions: heartbeats of the two report them. If `told` is 0, each heartbeat reports 256 changes.

Rate: placements ÷ CPU seconds of `handle` for all events, which arrive at about the same rate. Latency: queueing
(behind events handled before) and handling of a placement at half of the rate. Events arrive in virtual time, and each
takes its measured CPU time, so that other processes of the machine have little influence. Medians over rounds.
`python -m benchmarks.conductor --json out/conductor.json`
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.conductor.placement_load import Load, Scenario
from benchmarks.conductor.placement_rpc import rpc_rows
from benchmarks.harness.measure import medians, table, write_json
from moonserve.conductor.events import Event, Place, Placed
from moonserve.conductor.placement.policies import POLICY_NAMES, PUBLISHED_POLICY
from moonserve.conductor.state import ConductorState
from moonserve.protocol.latency import percentile
from moonserve.protocol.process.lifecycle import infrequent_gc

GROWTH_INSTANCES = (16, 64, 256, 1024)
GROWTH_BLOCKS = (100_000, 1_000_000, 10_000_000)
Row = dict[str, Any]


def main() -> int:
    arguments = _arguments()
    growth = [_growth_row(s, arguments) for s in _scenarios(arguments)]
    print(table(list(growth[0]), [list(row.values()) for row in growth]))
    result: Row = {"benchmark": "conductor", "rounds": arguments.rounds, "growth": growth}
    if arguments.policies:
        scenario = Scenario(num_instances=64, num_blocks=1_000_000)
        load = Load(scenario)
        rows = [{"policy": p, **_measured(load, arguments, p)} for p in POLICY_NAMES]
        print(table(list(rows[0]), [list(row.values()) for row in rows]))
        result["policies"] = rows
    if arguments.rpc:
        rows = rpc_rows(Scenario(num_instances=64, num_blocks=1_000_000), arguments.rounds)
        print(table(list(rows[0]), [list(row.values()) for row in rows]))
        result["rpc"] = rows
    if arguments.json:
        write_json(arguments.json, result)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=GROWTH_INSTANCES)
    parser.add_argument("--blocks", type=int, nargs="+", default=GROWTH_BLOCKS)
    parser.add_argument("--told", type=int, nargs="+", default=(0, 64), help="at 64 × 1,000,000")
    parser.add_argument("--placements", type=int, default=4_000, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency-rate", type=float, help="instead of half the measured rate")
    parser.add_argument("--policy", choices=POLICY_NAMES, default=PUBLISHED_POLICY)
    parser.add_argument("--policies", action="store_true", help="also a row for every policy")
    parser.add_argument("--rpc", action="store_true", help="also through gRPC and the lean transport")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _scenarios(arguments: argparse.Namespace) -> list[Scenario]:
    grown = [
        Scenario(num_instances=instances, num_blocks=blocks)
        for blocks in arguments.blocks
        for instances in arguments.instances
    ]
    told = [
        Scenario(num_instances=64, num_blocks=1_000_000, new_blocks_per_prompt=blocks)
        for blocks in arguments.told
        if blocks
    ]
    return grown + told


def _growth_row(scenario: Scenario, arguments: argparse.Namespace) -> Row:
    row: Row = {
        "instances": scenario.num_instances,
        "blocks": scenario.num_blocks,
        "told": scenario.new_blocks_per_prompt,
    }
    return row | _measured(Load(scenario), arguments, arguments.policy)


def _measured(load: Load, arguments: argparse.Namespace, policy: str) -> dict[str, float]:
    """Returns medians over the rounds of one cluster, which keeps its state from round to round."""
    state = load.cluster(policy)
    rows = [_round(state, load, arguments) for _ in range(arguments.rounds + 1)]
    state.validate()
    return medians(rows[1:])  # the first round warms caches and fills the ring of decisions


def _round(state: ConductorState, load: Load, arguments: argparse.Namespace) -> dict[str, float]:
    num_placements: int = arguments.placements
    script = load.script(num_placements, load.rate)
    took_ns = sum(_handled(state, script))
    rate = num_placements / took_ns * 1e9
    load.rate = rate  # heartbeats take a share of every second; the estimate improves with each round
    script = load.script(num_placements, arguments.latency_rate or rate / 2)
    waits_us = _latencies_us(script, _handled(state, script))
    return {
        "placements_per_s": rate,
        "place_us": took_ns / num_placements / 1e3,
        "p50_us": percentile(waits_us, 50),
        "p99_us": percentile(waits_us, 99),
    }


def _handled(state: ConductorState, script: list[tuple[float, Event]]) -> list[int]:
    """Returns the CPU nanoseconds of each event. Raises RuntimeError if a request is not placed."""
    clock = time.thread_time_ns
    took = []
    with infrequent_gc():  # as in the conductor's process
        for now, event in script:
            begun = clock()
            actions = state.handle(event, now)
            took.append(clock() - begun)
            if isinstance(event, Place) and not isinstance(actions[-1], Placed):
                raise RuntimeError(f"not placed: {actions[-1]}")
    return took


def _latencies_us(script: list[tuple[float, Event]], took_ns: list[int]) -> list[float]:
    """Returns the latency of placements from arrival to answer; one server handles events in order of arrival."""
    free_at, found = 0.0, []
    for (now, event), ns in zip(script, took_ns, strict=True):
        free_at = max(free_at, now) + ns / 1e9
        if isinstance(event, Place):
            found.append((free_at - now) * 1e6)
    return found


if __name__ == "__main__":
    sys.exit(main())
