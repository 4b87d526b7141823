"""`python -m benchmarks.networks bandwidth|outages`: measures and prints the tables of docs/networks.md.

Hosts are network namespaces of one machine, with links that can be made slow or lossy, or cut.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import median, table
from benchmarks.networks import bandwidth
from benchmarks.networks.cluster import HostsCluster, hosts_cluster
from benchmarks.networks.hosts import missing_requirement
from benchmarks.networks.outages import DEGRADED, OUTAGES, Outage, degraded, known_answers, run_outage


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("bandwidth", "outages"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement or outage")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases, from 0")
    arguments = parser.parse_args()
    if (reason := missing_requirement()) is not None:
        print(reason, file=sys.stderr)
        return 1
    if arguments.what == "bandwidth":
        cases = _chosen(bandwidth.CASES, arguments.only)
        print(bandwidth.report(cases, arguments.seconds, arguments.rounds))
        return 0
    return _outages(_chosen(OUTAGES, arguments.only), arguments.seconds, arguments.rounds)


def _chosen(cases: tuple[Any, ...], only: list[int] | None) -> tuple[Any, ...]:
    return cases if only is None else tuple(cases[number] for number in only)


def _outages(outages: tuple[Outage, ...], seconds: float, rounds: int) -> int:
    with (
        tempfile.TemporaryDirectory() as folder,
        hosts_cluster(Path(folder) / "logs") as cluster,
    ):
        known = known_answers(cluster)
        for title, link in DEGRADED:
            print(f"{title}: {dict(degraded(cluster, link, known))}", flush=True)
        rows = [_row(cluster, outage, known, seconds, rounds) for outage in outages]
        tracebacks = cluster.tracebacks()
    headers = ["outage", "right", "refused", "cut", "wrong", "longest, s", "served again after, s"]
    print(table(headers, rows))
    print(f"logs with tracebacks: {tracebacks or 'none'}")
    return 1 if tracebacks or any(row[4] for row in rows) else 0


def _row(cluster: HostsCluster, outage: Outage, known: Mapping[str, str], seconds: float, rounds: int) -> list[Any]:
    reports = [run_outage(cluster, outage, known, seconds) for _ in range(rounds)]
    outcomes: Counter[str] = sum((report.outcomes for report in reports), Counter())
    recovered = [report.recovered_s for report in reports]
    print(f"{outage.title}: {dict(outcomes)} {[f'{s:.1f}' for s in recovered]}", flush=True)
    return [
        outage.title,
        *(outcomes[verdict] for verdict in ("right", "refused", "cut", "wrong")),
        f"{max(report.longest_s for report in reports):.1f}",
        f"{median(recovered):.1f} ({max(recovered):.1f})",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
