"""`python -m benchmarks.faults`: repeats each fault on real processes of the demo model, with real signals.

Claims for a client: if any process is killed, or stopped for 20 s, the tokens equal those of an undisturbed run, under
one id. If another process can take over, the client waits for at most 3 s. Prints a table and writes JSON.

`--engine vllm` does the same with vLLM's engine, and with a damaged store, a full one and partitions.
"""

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults.scenarios import ALONE, FLAGS, KILLS, STANDBY, STOPS, Scenario, ScenarioResult, run_scenario
from benchmarks.faults.testbed import FaultCluster, Redis
from benchmarks.faults.vllm_scenarios import SCENES, vllm_cluster
from benchmarks.harness.measure import median, table, write_json

_HEADERS = ("fault", "signal", "cluster", "waited, s (median)", "worst", "exact")
_VLLM_HEADERS = (
    *("process or link", "fault", "cluster", "running stream waited, s (median)", "worst"),
    *("new request waited, s (median)", "worst", "exact"),
)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    has_vllm = options.engine == "vllm"
    scenes = [
        scene
        for scene in (SCENES if has_vllm else (*KILLS, *STOPS))
        if any(part in f"{scene.fault.name} {scene.name}" for part in options.only)
    ]
    rows: list[dict[str, Any]] = []
    if has_vllm:
        played = _run_vllm(scenes, options.vllm_python, options.repeat)
    else:
        played = ((scene, _run_repeatedly(scene, options.repeat)) for scene in scenes)
    for scene, results in played:
        rows.append(_row(scene, results))
        sys.stderr.write(f"{rows[-1]}\n")
    cells = [(_vllm_cells if has_vllm else _cells)(row) for row in rows]
    sys.stdout.write(table(_VLLM_HEADERS if has_vllm else _HEADERS, cells) + "\n")
    if options.json is not None:
        write_json(options.json, {"faults": rows})
    return 0 if all(row["num_exact"] == options.repeat for row in rows) else 1


def _run_vllm(
    scenes: Sequence[Scenario], python: str, repeat: int
) -> Iterator[tuple[Scenario, Sequence[ScenarioResult]]]:
    """Plays scenes with the same cluster in turns, because vLLM starts slowly."""
    for cluster, group in itertools.groupby(scenes, key=lambda scene: scene.cluster):
        alike = list(group)
        with tempfile.TemporaryDirectory() as folder, vllm_cluster(cluster, python, Path(folder)) as victims:
            rounds = [[run_scenario(scene, victims, seed) for scene in alike] for seed in range(repeat)]
        yield from zip(alike, zip(*rounds, strict=True), strict=True)


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
        "signal": scene.fault.name,
        "cluster": scene.cluster,
        "waited_s": [round(each.waited_s, 3) for each in played],
        "stream_waited_s": [round(each.stream_waited_s, 3) for each in played],
        "num_exact": sum(not (each.wrong or each.error) for each in played),
        "complaints": [each.error or each.wrong for each in played if each.error or each.wrong],
    }


def _cells(row: dict[str, Any]) -> list[Any]:
    exact = f"{row['num_exact']} of {len(row['waited_s'])}"
    return [row["fault"], row["signal"], row["cluster"], *_median_and_worst(row["waited_s"]), exact]


def _vllm_cells(row: dict[str, Any]) -> list[Any]:
    *begin, exact = _cells(row)
    return [*begin[:3], *_median_and_worst(row["stream_waited_s"]), *begin[3:], exact]


def _median_and_worst(waited: Sequence[float]) -> tuple[str, str]:
    return f"{median(waited):.2f}", f"{max(waited):.2f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("moonserve", "vllm"), default="moonserve")
    parser.add_argument(
        "--vllm-python",
        default=os.environ.get("MOONSERVE_VLLM_PYTHON", sys.executable),
        help="interpreter of an environment with vLLM",
    )
    parser.add_argument("--repeat", type=int, default=5, help="times that each fault is played")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="faults with it in “SIGNAL name”")
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
