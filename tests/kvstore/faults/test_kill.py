"""SIGKILL of a node while it stores, serves, demotes, copies or compacts: objects on its disk are found again. SIGSTOP
of a node under load: the other nodes go on, and when it continues no object is wrong or missing."""

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from moonserve.deploy.launcher.ports import free_port
from moonserve.kvstore.client import KvStore, plain_key
from tests.kvstore.client.pools import both_ways
from tests.kvstore.faults.mounts import segments
from tests.kvstore.faults.pool import Pool, running_directory, running_pool, until_on_disk
from tests.kvstore.faults.values import BLAMELESS, Load, name_of, put_many, value_of
from tests.patience import PATIENCE_S, until
from tests.thoroughness import THOROUGH

LARGE = 6 * 2**20
ROUNDS = 2 if THOROUGH else 1
NUM_SEGMENTS = 8
"""Number of segments of a small disk (`kvstore.disk.tier`)."""
STOPPED_S = 3.0
"""Shorter than a node's lease at the registry. `test_absence` stops a node for longer."""


@both_ways
def test_a_node_killed_during_a_put_keeps_nothing_half_written(tmp_path: Path, transports: tuple[str, ...]) -> None:
    rng = random.Random(1)
    with running_pool(tmp_path, 1, "--dram", "16MiB", "--ssd-write-through", ssd="128MiB") as pool:
        names, kill = [], partial(pool.kill, "store-0")
        for number in range(ROUNDS):
            with pool.store(transports) as store:
                put_many(store, f"attaches {number}", 1, 10)
                names.append(name_of("large", number, LARGE))
                with after(rng.uniform(0.0, 0.03), kill), contextlib.suppress(*BLAMELESS):
                    store.put(names[-1], value_of(names[-1]), timeout_s=5.0)
            pool.restart("store-0")
        with pool.store(transports) as store:
            stored = put_many(store, "afterwards", 5, 100_000)
        pool.audit(names, held=stored)


@contextlib.contextmanager
def after(after_s: float, happens: Callable[[], object]) -> Iterator[None]:
    """Calls `happens` in a thread `after_s` after the context is entered. The context ends after the call."""
    timer = threading.Timer(after_s, happens)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@both_ways
def test_a_node_killed_during_gets_from_memory_and_disk_never_gives_wrong_bytes(
    tmp_path: Path, transports: tuple[str, ...]
) -> None:
    with running_pool(tmp_path, 1, "--dram", "8MiB", "--ssd-write-through", ssd="128MiB") as pool:
        with pool.store(transports) as store:
            names = put_many(store, "read", 40, 500_000)
            until_on_disk(pool, "store-0", names)
            with after(0.2, partial(pool.kill, "store-0")), contextlib.suppress(*BLAMELESS):
                for name in itertools.cycle(names):
                    # Mapped memory stays readable after the node's death; objects only on its disk do not.
                    assert store.get(name, timeout_s=5.0) == value_of(name)
        pool.restart("store-0")
        pool.audit([], held=names)


def test_a_node_killed_during_demotions_finds_again_what_was_on_its_disk(tmp_path: Path) -> None:
    with running_pool(tmp_path, 1, "--dram", "8MiB", ssd="64MiB") as pool:
        with pool.store() as store, Load(store, "demoted", nbytes=500_000, kept=60) as load:
            for _ in range(ROUNDS):
                load.go_on(60)
                pool.until_stats("store-0", lambda stats: stats.num_on_disk)
                kill_under(pool, load)
        pool.audit(load.uncertain, gone=load.removed)


def kill_under(pool: Pool, load: Load) -> None:
    """Kills and restarts the node. Objects on its disk must be found again unless the load removes them."""
    names = {plain_key(name): name for name in [*load.stored, *load.uncertain]}
    on_disk = {names[o.key] for o in pool.objects("store-0") if o.on_disk and o.key in names}
    pool.restart("store-0")
    load.go_on(5)
    with pool.store() as store:
        missing = {name for name in on_disk if store.get(name) is None}
    lost = missing - load.removed - load.uncertain
    assert not lost, f"{len(lost)} of {len(on_disk)} are lost"


def test_a_node_killed_during_compaction_loses_nothing_and_brings_nothing_back(tmp_path: Path) -> None:
    with running_pool(tmp_path, 1, "--dram", "4MiB", "--ssd-write-through", ssd="16MiB") as pool:
        with pool.store() as store, Load(store, "churn", nbytes=400_000, kept=20) as load:
            # A number above NUM_SEGMENTS means that other segments have been emptied.
            last = f"segment-{NUM_SEGMENTS:010}.kv"
            until(lambda: any(path.name > last for path in segments(pool.disks["store-0"])))
            for _ in range(ROUNDS):
                load.go_on(160)  # twice the disk's capacity
                kill_under(pool, load)
        pool.audit(load.uncertain, gone=load.removed)


@pytest.mark.parametrize("victim", ["store-0", "store-1", "directory"])
def test_a_node_killed_during_replication_leaves_whole_replicas(tmp_path: Path, victim: str) -> None:
    port = free_port()
    flags = ("--dram", "64MiB", "--ssd-write-through")
    with (
        contextlib.ExitStack() as directories,
        running_pool(tmp_path, 2, *flags, ssd="256MiB", registry=f"127.0.0.1:{port}") as pool,
    ):
        directory = directories.enter_context(running_directory(port=port))
        with pool.store() as store, pool.alone("store-0") as source:
            names = put_many(source, "copied", 60, 500_000)
            until_on_disk(pool, "store-0", names)
            kill = directory.kill if victim == "directory" else partial(pool.kill, victim)
            with after(0.15, kill), contextlib.suppress(*BLAMELESS):
                store.change_replica(names, 2, timeout_s=5.0)
        if victim == "directory":
            directory.wait()
            directories.enter_context(running_directory(port=port))
        else:
            pool.restart(victim)
        pool.audit([], held=names)  # no lease or reservation is left at either node
        with pool.store() as store:
            until(lambda: is_replicated(pool, store, names))
            until_on_disk(pool, "store-1", names)
        pool.kill("store-0")
        with pool.alone("store-1") as store:
            assert all(store.get(name) == value_of(name) for name in names)


def is_replicated(pool: Pool, store: KvStore, names: list[bytes]) -> bool:
    """Returns True if `store-1` has all objects. Otherwise requests them, since only metrics report a failed copy."""
    if {plain_key(name) for name in names} <= {o.key for o in pool.objects("store-1")}:
        return True
    store.change_replica(names, 2, timeout_s=PATIENCE_S)
    return False


def test_a_stopped_node_costs_nothing_but_time(tmp_path: Path) -> None:
    with running_pool(tmp_path, 3, "--dram", "256MiB") as pool:
        with pool.store() as store, Load(store, "stop", timeout_s=2.0) as load:
            load.go_on(30)
            with pool.frozen("store-1"):
                load.go_on_for(STOPPED_S)
            load.go_on(30)
        pool.audit(load.uncertain, held=load.stored)
