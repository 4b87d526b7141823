"""One run: truth first, then a cluster, clients and faults beside each other, then quiet and the accounts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.clients import Clients
from tests.chaos.clock import Clock
from tests.chaos.report import Report
from tests.chaos.schedule import schedule
from tests.chaos.striking import Striking
from tests.chaos.truth import BLOCK_SIZE, SYNTHETIC, Wish
from tests.e2e.cluster import UNHURRIED, Cluster
from tests.e2e.test_lifecycle import left_in_shm
from tests.patience import PATIENCE_S

NUM_WISHES = 60
FLAGS = (
    *UNHURRIED,
    *("--block-size", str(BLOCK_SIZE), "--kv-cache-memory", "64MiB"),
    *("--prefill-workers", "2", "--decode-workers", "2", "--store-nodes", "1"),
    # Small, so that the disk is used.
    *("--dram", "16MiB"),
)
DISK_SIZE = "256MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is run."""

    model: Path | None  # None: the demo model
    seed: int
    minutes: float
    trace: Path = SYNTHETIC
    flags: tuple[str, ...] = FLAGS


def run(terms: Terms, wishes: list[Wish], folder: Path) -> Report:
    """`folder`: for logs and the store's disk. What `report.is_good` says no to is in the report and the logs."""
    disk = folder / "disk"
    shm_before = set(os.listdir("/dev/shm"))
    flags = (*terms.flags, "--ssd", f"{disk}:{DISK_SIZE}")
    cluster = Cluster(terms.model, *flags, log_dir=folder / "logs")
    left: list[str] = []
    with _ended(cluster, left, shm_before):
        cluster.wait_until_ready()
        faults = schedule(terms.seed, terms.minutes * 60, sorted(cluster.pids()))
        clock = Clock()
        clients = Clients(cluster.url, wishes, terms.seed, clock)
        striking = Striking(cluster, faults, disk, clock)
        striking.start()
        began_at = clock.now()
        try:
            asyncio.run(clients.run(terms.minutes * 60))
        finally:
            striking.end()
            striking.join()
            striking.relieve()
        minutes = round((clock.now() - began_at) / 60, 1)
        left += _what_is_left(cluster)
    return Report(
        seed=terms.seed,
        minutes=minutes,
        trace=terms.trace.stem,
        cluster="2 prefill workers, 2 decode workers, a store node with a disk",
        faults=striking.done,
        faults_skipped=striking.skipped,
        tally=clients.tally,
        left=left,
    )


def _what_is_left(cluster: Cluster) -> list[str]:
    """When all is quiet: what is held, who is missing, what went wrong inside."""
    left: list[str] = []
    try:
        cluster.wait_until_all_is_free()
    except AssertionError:
        left += cluster.in_use()
    return left + [f"traceback in {name}" for name in cluster.tracebacks()]


@contextmanager
def _ended(cluster: Cluster, left: list[str], shm_before: set[str]) -> Iterator[None]:
    """Stops it, and adds what outlives it."""
    try:
        yield
    finally:
        family = psutil.Process(cluster.process.pid).children(recursive=True)
        code = cluster.stop()
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        left += [f"process {each.pid}" for each in alive]
        left += [f"exit code {code}"] if code else []
        left += [f"/dev/shm/{name}" for name in left_in_shm(shm_before)]
