"""Several active conductors beside one that knows everything: simulated with the real state machines, and live.

`python -m benchmarks.conductor.fleet --instances 1000 --shards 1 16` simulates. 50,000 prompts per second arrive;
instances are as fast as the load asks for. `--faults` adds a run in which one shard dies and returns, and one in which
it is cut off from the others. `--live` measures processes (`benchmarks.conductor.fleet.live`), `--compare` runs the
same fleet simulated and live (`benchmarks.conductor.fleet.comparison`), `--growth` measures memory and processor time
of one conductor by blocks and instances.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conductor.fleet.comparison import compared_rows
from benchmarks.conductor.fleet.growth import growth_rows
from benchmarks.conductor.fleet.live import live_rows
from benchmarks.conductor.fleet.simulation import Fleet
from benchmarks.conductor.fleet.workload import Scenario, Served, hit_ratio
from benchmarks.harness.measure import table, write_json
from moonserve.conductor.placement.policies import DEFAULT_POLICY, POLICY_NAMES
from moonserve.protocol.process.lifecycle import infrequent_gc

DIES_AT_S, BACK_AT_S, FAULT_END_S = 1.5, 3.5, 7.0
STEP_S = 0.25
Row = dict[str, Any]


def main() -> int:
    arguments = _arguments()
    result: Row = {"benchmark": "conductor.fleet", "load": arguments.load, "seed": arguments.seed}
    if arguments.live:
        result["live"] = live_rows(arguments.measured_s)
        _show(result["live"])
    elif arguments.compare:
        result["compared"] = compared_rows(_scenario(arguments.instances[0], arguments.shards[0], arguments))
        _show(result["compared"])
    elif arguments.growth:
        result["growth"] = growth_rows(arguments.instances, arguments.blocks)
        _show(result["growth"])
    else:
        result["rows"] = [row for n in arguments.instances for row in _rows(n, arguments)]
        _show(result["rows"])
        if arguments.faults:
            result["faults"] = [_fault_row(n, arguments, kind) for n in arguments.instances for kind in ("dies", "cut")]
            _show(result["faults"])
    if arguments.json:
        write_json(arguments.json, result)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=[1_000], help="half of them prefill")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rate", type=float, default=50_000, help="prompts per second")
    parser.add_argument("--load", type=float, default=0.6, help="of the prefill instances, with one conductor")
    parser.add_argument("--policy", default=DEFAULT_POLICY, choices=POLICY_NAMES)
    parser.add_argument("--warm-s", type=float, default=2.0)
    parser.add_argument("--measured-s", type=float, default=2.0)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--blocks", type=int, nargs="+", default=[100_000, 1_000_000, 4_000_000])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _scenario(num_instances: int, num_shards: int, a: argparse.Namespace, **faults: Any) -> Scenario:
    times = {"warm_s": a.warm_s, "measured_s": a.measured_s} | faults
    return Scenario(
        num_instances=num_instances,
        num_shards=num_shards,
        rate=a.rate,
        load=a.load,
        seed=a.seed,
        policy=a.policy,
        **times,
    )


def _run(scenario: Scenario) -> tuple[Fleet, list[Served]]:
    fleet = Fleet(scenario)
    with infrequent_gc():
        fleet.run()
    return fleet, [served for served in fleet.served if served.at >= scenario.warm_s]


def _rows(num_instances: int, arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for num_shards in arguments.shards:
        scenario = _scenario(num_instances, num_shards, arguments)
        fleet, served = _run(scenario)
        ttft_s = np.array([each.ttft_s for each in served])
        by_shard = Counter(each.shard for each in served)
        shares = np.array([by_shard[address] for address in fleet.addresses]) * num_shards / len(served)
        busy_s = sum(scenario.seconds_of(each) for each in served)
        row = {
            "instances": num_instances,
            "conductors": num_shards,
            "hit ratio": hit_ratio(served),
            "TTFT p50 ms": 1e3 * float(np.percentile(ttft_s, 50)),
            "p90": 1e3 * float(np.percentile(ttft_s, 90)),
            "p99": 1e3 * float(np.percentile(ttft_s, 99)),
            "load": busy_s / scenario.measured_s / scenario.num_prefills,
            "sent away": fleet.num_redirected / len(fleet.served),
            "least, most per shard": f"{shares.min():.2f}, {shares.max():.2f}",
            "cores per conductor": max(fleet.cpu_s.values()) / (scenario.warm_s + scenario.measured_s),
        }
        first = rows[0] if rows else row
        row["hits ÷ one"] = row["hit ratio"] / first["hit ratio"]
        row["p90 ÷ one"] = row["p90"] / first["p90"]
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def _fault_row(num_instances: int, arguments: argparse.Namespace, kind: str) -> Row:
    """One shard dies, or hears nothing from the others, and returns. TTFT and hit ratio are of all prompts."""
    num_shards = max(arguments.shards)
    times = {"warm_s": 0.0, "measured_s": FAULT_END_S, f"{kind}_at": DIES_AT_S, "back_at": BACK_AT_S}
    fleet, served = _run(_scenario(num_instances, num_shards, arguments, **times))
    steps: dict[int, list[Served]] = {}
    for each in served:
        steps.setdefault(int(each.at / STEP_S), []).append(each)
    ttft_s = {step: float(np.mean([each.ttft_s for each in group])) for step, group in steps.items()}
    before, back = int(DIES_AT_S / STEP_S), int(BACK_AT_S / STEP_S)
    usual_s = float(np.mean([ttft_s[step] for step in range(before // 2, before)]))
    slow = [step for step in range(before, back) if ttft_s[step] > 1.1 * usual_s]
    last = int(FAULT_END_S / STEP_S) - 1
    row = {
        "instances": num_instances,
        "conductors": num_shards,
        "fault": kind,
        "lost": fleet.num_lost(),
        "longest without placement s": max(fleet.unplaced_s, default=0.0),
        "worst mean TTFT ÷ before": max(ttft_s[step] for step in range(before, back)) / usual_s,
        "s until within 10 %": (slow[-1] + 1 - before) * STEP_S if slow else 0.0,
        "lowest hit ratio": min(hit_ratio(steps[step]) for step in range(before, back)),
        "before": hit_ratio([each for step in range(before) for each in steps[step]]),
        "worst mean TTFT after return ÷ before": max(ttft_s[step] for step in range(back, last)) / usual_s,
        "its instances at the end": fleet.num_instances_of_first(),
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def _show(rows: list[Row]) -> None:
    print(table(list(rows[0]), [[f"{v:.3g}" if isinstance(v, float) else v for v in row.values()] for row in rows]))


if __name__ == "__main__":
    sys.exit(main())
