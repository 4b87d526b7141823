"""`python -m benchmarks.faults`: repeats each fault on real processes of the demo model, with real signals.

Claims for a client: if any process is killed, or stopped for 20 s, the tokens equal those of an undisturbed run, under
one id. If another process can take over, the client waits for at most 3 s. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults.scenarios import ALONE, FLAGS, KILLS, STANDBY, STOPS, Scenario, ScenarioResult, run_scenario
from benchmarks.faults.testbed import FaultCluster, Redis
from benchmarks.harness.measure import median, table, write_json

_HEADERS = ("fault", "signal", "cluster", "waited, s (median)", "worst", "exact")


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    scenes = [
        scene for scene in (*KILLS, *STOPS) if any(part in f"{scene.number.name} {scene.name}" for part in options.only)
    ]
    rows: list[dict[str, Any]] = []
    for scene in scenes:
        rows.append(_row(scene, _run_repeatedly(scene, options.repeat)))
        sys.stderr.write(f"{rows[-1]}\n")
    sys.stdout.write(table(_HEADERS, [_cells(row) for row in rows]) + "\n")
    if options.json is not None:
        write_json(options.json, {"faults": rows})
    return 0 if all(row["num_exact"] == options.repeat for row in rows) else 1


def _run_repeatedly(scene: Scenario, repeat: int) -> list[ScenarioResult]:
    """Plays a scene `repeat` times. With one process of each kind, each time has its own cluster, because the launcher
    delays the restart of a process that dies often."""
    if scene.cluster == ALONE:
        return [_on_new_cluster(scene, seed) for seed in range(repeat)]
    with _fault_cluster(scene.cluster) as victims:
        return [run_scenario(scene, victims, seed) for seed in range(repeat)]


def _on_new_cluster(scene: Scenario, seed: int) -> ScenarioResult:
    with _fault_cluster(scene.cluster) as victims:
        return run_scenario(scene, victims, seed)


@contextlib.contextmanager
def _fault_cluster(cluster: str) -> Iterator[FaultCluster]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        redis = None
        if cluster == STANDBY:
            redis = stack.enter_context(contextlib.closing(Redis(Path(folder))))
        victims = FaultCluster(*FLAGS[cluster], log_dir=Path(folder), redis=redis)
        try:
            victims.wait_until_ready()
            yield victims
        finally:
            victims.stop(30.0)


def _row(scene: Scenario, played: Sequence[ScenarioResult]) -> dict[str, Any]:
    return {
        "fault": scene.name,
        "signal": scene.number.name,
        "cluster": scene.cluster,
        "waited_s": [round(each.waited_s, 3) for each in played],
        "num_exact": sum(not (each.wrong or each.error) for each in played),
        "complaints": [each.error or each.wrong for each in played if each.error or each.wrong],
    }


def _cells(row: dict[str, Any]) -> list[Any]:
    waited = row["waited_s"]
    return [
        *(row["fault"], row["signal"], row["cluster"]),
        *(f"{median(waited):.2f}", f"{max(waited):.2f}"),
        f"{row['num_exact']} of {len(waited)}",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="times that each fault is played")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="faults with it in “SIGNAL name”")
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
