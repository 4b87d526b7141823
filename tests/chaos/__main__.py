"""`python -m tests.chaos --minutes N --seed S` computes expected tokens, runs a cluster with clients and faults, and
prints the results when the cluster is quiet. Exits with 1 if a request was lost or wrong, or resources are left."""

import argparse
import asyncio
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import psutil

from moonserve.models import demo_model_path
from tests.chaos.clients import BLOCK_SIZE, Clients, Tally, wishes
from tests.chaos.faults import Clock, Striking, schedule
from tests.e2e.cluster import UNHURRIED, Cluster
from tests.e2e.test_lifecycle import left_in_shm
from tests.patience import PATIENCE_S
from tests.thoroughness import TRACE
from tests.traces.made import write_small

NUM_WISHES = 60
FLAGS = (
    *UNHURRIED,
    *("--block-size", str(BLOCK_SIZE), "--kv-cache-memory", "64MiB"),
    *("--prefill-workers", "2", "--decode-workers", "2", "--store-nodes", "1"),
    # Little memory, so that the disk is used.
    *("--dram", "16MiB"),
)
DISK_SIZE = "256MiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path, default=TRACE if TRACE.exists() else None)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    (folder / "disk").mkdir()
    trace = options.trace or write_small(folder / "small.jsonl")
    asked = wishes(demo_model_path(), trace, NUM_WISHES)
    shm_before = set(os.listdir("/dev/shm"))
    flags = (*FLAGS, "--ssd", f"{folder / 'disk'}:{DISK_SIZE}")
    cluster = Cluster(None, *flags, log_dir=folder / "logs")
    left: list[str] = []
    try:
        cluster.wait_until_ready()
        faults = schedule(options.seed, options.minutes * 60, sorted(cluster.pids()))
        clock = Clock()
        clients = Clients(cluster.url, asked, options.seed, clock)
        striking = Striking(cluster, faults, folder / "disk", clock)
        striking.start()
        try:
            asyncio.run(clients.run(options.minutes * 60))
        finally:
            striking.relieve()
        try:
            cluster.wait_until_all_is_free()
        except AssertionError:
            left += cluster.in_use()
        left += [f"traceback in {name}" for name in cluster.tracebacks()]
    finally:
        left += end(cluster, shm_before)
    tally = clients.tally
    print(f"{options.minutes:g} minutes, seed {options.seed}, trace {trace.stem}")
    print(accounts(tally, striking.done, striking.skipped, left))
    is_served = tally.kept + tally.retried > 0 and striking.done.total() > 0
    if is_served and not (tally.lost or tally.wrong or left):
        return 0
    print(*tally.complaints, f"logs: {folder / 'logs'}", sep="\n", file=sys.stderr)
    return 1


def end(cluster: Cluster, shm_before: set[str]) -> list[str]:
    """Stops the cluster and returns the processes and shared memory that outlive it, and its exit code if not 0."""
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    code = cluster.stop()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    left = [f"process {each.pid}" for each in alive] + ([f"exit code {code}"] if code else [])
    return left + [f"/dev/shm/{name}" for name in left_in_shm(shm_before)]


def accounts(tally: Tally, faults: Counter[str], skipped: int, left: list[str]) -> str:
    """Returns the readable results, one per line."""
    lines = {
        "asked": tally.kept + tally.retried + tally.lost + tally.wrong,
        "kept at the first attempt": tally.kept,
        "kept after the client asked again": tally.retried,
        "lost": tally.lost,
        "wrong": tally.wrong,
        "tokens compared": tally.num_tokens,
        "longest gap in a stream that went well": f"{tally.longest_gap_s:.1f} s",
        **{f"refused: {how}": count for how, count in sorted(tally.refusals.items())},
        **{f"fault: {name}": count for name, count in sorted(faults.items())},
        "faults not done, the victim was down already": skipped,
        "left at the end": ", ".join(left) or "nothing",
    }
    return "\n".join(f"{name}: {value}" for name, value in lines.items())


if __name__ == "__main__":
    sys.exit(main())
