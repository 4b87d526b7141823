"""A pool without its directory or its registry stores and serves; after their return, all of them agree again. An id
and a folder belong to one node."""

from pathlib import Path

import pytest

from moonserve.deploy.launcher.ports import free_port
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.membership.registry import TTL_S
from tests.kvstore.faults.pool import Pool, held, running_directory, running_pool, until_in_step
from tests.kvstore.faults.values import Load, put_many, value_of
from tests.patience import PATIENCE_S, until
from tests.redis_server import RedisServer
from tests.thoroughness import seconds

OUTAGES = [
    (3.0, 0.0),
    # Longer than the members' leases of 10 s.
    pytest.param(seconds(12.0, 20.0), 0.02, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("outage_s", "pause_s"), OUTAGES)
def test_a_killed_redis_may_return_empty(tmp_path: Path, outage_s: float, pause_s: float) -> None:
    with RedisServer() as redis, running_pool(tmp_path, 3, "--dram", "256MiB", registry=redis.url) as pool:
        with pool.store() as store, Load(store, "redis", pause_s=pause_s) as load:
            load.go_on(20)
            redis.kill()
            load.go_on_for(outage_s)
            redis.start()
            load.go_on_for(2.0)
        assert not load.errors
        assert not load.missed
        pool.audit([], held=load.stored, gone=load.removed)


def test_a_killed_directory_is_not_missed_and_agrees_with_the_nodes_when_it_is_back(tmp_path: Path) -> None:
    port = free_port()
    with running_pool(tmp_path, 3, "--dram", "256MiB", registry=f"127.0.0.1:{port}") as pool:
        with running_directory(port=port) as directory:
            store = pool.store()
            with pool.alone("store-1") as alone:
                away = put_many(alone, "away from home", 20, 1000)
            until_in_step(pool)
            directory.kill()
            directory.wait()
        with store:
            assert all(store.get(name) == value_of(name) for name in away)
            with Load(store, "directory") as load:
                load.go_on(30)
                with running_directory(port=port):
                    load.go_on(30)
                    until_in_step(pool)
            assert not load.errors
            assert not load.missed
        with running_directory(port=port):
            until_in_step(pool)
            until(lambda: agree(pool))
            pool.audit(away, held=load.stored, gone=load.removed)


def agree(pool: Pool) -> bool:
    """Returns True if the directory names for each object exactly the nodes that list it."""
    listed: dict[BlockKey, set[str]] = {}
    for node_id in pool.running:
        for stored in pool.objects(node_id):
            listed.setdefault(BlockKey(stored.key), set()).add(node_id)
    return held(pool, list(listed)) == list(listed.values())


@pytest.mark.slow  # waits twice for a lease of 10 s to end
def test_the_second_owner_of_an_id_ends_with_a_reason_and_takes_over_a_dead_ones_place(tmp_path: Path) -> None:
    with running_pool(tmp_path, 1, "--dram", "64MiB") as pool:
        first = pool.running["store-0"]
        with pool.store() as store, Load(store, "first") as load:
            load.go_on(10)
            second = pool.begin("store-0")
            second.facts()
            assert second.process.wait(TTL_S + PATIENCE_S) == 1
            said = pool.said()
            assert "store-0 belongs to another process, which keeps renewing it" in said
            assert first.rpc_address in said
            load.go_on(10)
            assert not load.errors
            assert not load.missed
        pool.audit([], held=load.stored, gone=load.removed)
        pool.kill("store-0")
        pool.start("store-0")
        with pool.store() as store, Load(store, "second") as load:
            load.go_on(10)
        pool.audit([], held=load.stored, gone=load.removed)


def test_a_folder_belongs_to_one_running_node(tmp_path: Path) -> None:
    with running_pool(tmp_path, 1, "--dram", "8MiB", ssd="64MiB") as pool:
        pool.disks["store-1"] = pool.disks["store-0"]
        with pytest.raises(ChildProcessError, match="in use"):
            pool.start("store-1")
        with pytest.raises(ChildProcessError, match="in use"):
            pool.start("store-0")
        with pool.store() as store, Load(store, "alone") as load:
            load.go_on(10)
        pool.restart("store-0")
        pool.audit(load.stored)
