"""Measures the cost of one open dashboard: CPU time of the whole cluster with and without the page's requests.

Run `python -m benchmarks.serving.gateway.dashboard` on an idle machine; it takes two minutes. Bar: 1 % of a core.
"""

import json
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import mean

import psutil

from moonserve.deploy.launcher.local_cluster import LocalCluster, running_cluster

_LOOKS = 10
_PERIOD_S = 2.0
_ROUNDS = 2
_PATHS = ("/v1/cluster", "/v1/figures")
_HISTORY_EVERY = 3  # looks
BAR = 0.01


def main() -> None:
    """Prints the cores used without and with a dashboard, and compares the difference with the bar."""
    with tempfile.TemporaryDirectory() as folder, running_cluster(None, log_dir=Path(folder)) as cluster:
        used: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(_ROUNDS):
            for looking in used:
                used[looking].append(_cores(cluster, looking=looking))
    without, with_one = mean(used[False]), mean(used[True])
    cost = with_one - without
    print(f"cores without {without:.4f}, with {with_one:.4f}: an open page costs {cost:.2%}")
    print(f"bar {BAR:.0%}: {'met' if cost <= BAR else 'missed'}")


def _cores(cluster: LocalCluster, *, looking: bool) -> float:
    processes = psutil.Process(cluster.process.pid).children(recursive=True)
    before, began = _spent_s(processes), time.monotonic()
    known = 0
    for look in range(_LOOKS):
        if looking:
            for path in _PATHS:
                urllib.request.urlopen(f"{cluster.url}{path}").read()
            if look % _HISTORY_EVERY == 0:
                known = json.load(urllib.request.urlopen(f"{cluster.url}/v1/history?after={known}"))["number"]
        time.sleep(_PERIOD_S)
    return (_spent_s(processes) - before) / (time.monotonic() - began)


def _spent_s(processes: list[psutil.Process]) -> float:
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


if __name__ == "__main__":
    main()
