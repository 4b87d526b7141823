"""Disks that become full, read-only, unmounted or damaged while a node runs, or between two of its lives."""

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from moonserve.kvstore.client import plain_key
from tests.kvstore.client.pools import both_ways
from tests.kvstore.faults.mounts import fill_up, flip, flip_bits, mounted, read_only, segments, take_away
from tests.kvstore.faults.pool import Pool, running_pool
from tests.kvstore.faults.values import FOR_EVER, Load, put_many, value_of
from tests.patience import until

SMALL = ("--dram", "8MiB")


def test_a_full_disk_refuses_nobody_and_a_node_starts_on_it(tmp_path: Path) -> None:
    """A full disk fails no call, and a node starts on it. On 20 MiB, the third segment of 8 MiB cannot be created."""
    with mounted(tmp_path / "store-0", 20 * 2**20) as disk, running_pool(tmp_path, 1, *SMALL, ssd="64MiB") as pool:
        with pool.store() as store, Load(store, "full", nbytes=500_000, kept=FOR_EVER) as load:
            load.go_on(100)
            filler = fill_up(disk)
            load.go_on(30)
        assert not load.errors
        assert pool.stats("store-0").disk_health == "good"
        assert pool.stats("store-0").num_on_disk
        kept = {o.key for o in pool.objects("store-0") if o.on_disk}
        on_disk = [name for name in load.stored if plain_key(name) in kept]
        pool.restart("store-0")
        with pool.store() as store:
            put_many(store, "after", 5, 100_000)
        pool.audit(load.stored, held=on_disk)
        filler.unlink()


@pytest.mark.parametrize("health", ["read-only", "failed"])
def test_a_disk_that_turns_read_only_or_vanishes_costs_what_was_on_it_and_no_request(
    tmp_path: Path, health: str
) -> None:
    with mounted(tmp_path / "store-0", 128 * 2**20) as disk, running_pool(tmp_path, 1, *SMALL, ssd="64MiB") as pool:
        with pool.store() as store, Load(store, health, nbytes=500_000, kept=FOR_EVER) as load:
            load.go_on(60)
            with read_only(disk) if health == "read-only" else nullcontext(take_away(disk)):
                pool.until_stats("store-0", lambda stats: stats.disk_health == health)
                load.go_on(30)
            assert not load.errors
        assert pool.stats("store-0").num_on_disk == 0
        if health == "read-only":
            pool.restart("store-0")
            assert pool.stats("store-0").disk_health == "good"
        assert pool.audit(load.stored) or health == "failed"


@pytest.mark.parametrize("damage", ["truncated", "flipped bits"])
def test_a_segment_damaged_while_its_node_is_down_costs_no_more_than_the_damaged_part(
    tmp_path: Path, damage: str
) -> None:
    with running_pool(tmp_path, 1, "--dram", "32MiB", ssd="64MiB") as pool:
        with pool.store() as store:
            names = put_many(store, "damaged", 400, 30_000)
        pool.stop("store-0")
        for number, path in enumerate(segments(pool.disks["store-0"])):
            if damage == "flipped bits":
                flip_bits(path, 20, number)
            elif number == 0:
                os.truncate(path, path.stat().st_size // 2 + 1000)
        pool.restart("store-0")
        pool.verify("store-0")
        found = pool.audit(names)
        assert len(names) // 3 < len(found) < len(names)
        with pool.store() as store:
            again = put_many(store, "again", 40, 300_000)
        pool.restart("store-0")
        pool.audit(again, held=found, gone=set(names) - found)


@both_ways
def test_a_bit_that_flips_on_the_disk_of_a_running_node_is_a_miss_or_another_replica(
    tmp_path: Path, transports: tuple[str, ...]
) -> None:
    with running_pool(tmp_path, 2, *SMALL, ssd="64MiB") as pool:
        names = put_at(pool, "store-0")
        assert put_at(pool, "store-1") == names
        until(lambda: pool.stats("store-0").leased_bytes == 0)
        only_on_disk = {o.key for o in pool.objects("store-0") if o.on_disk and not o.in_memory}
        rotten = [name for name in names if plain_key(name) in only_on_disk][:10]
        for name in rotten:
            rot(pool, "store-0", name)
        read, verified = rotten[:5], rotten[5:]
        with pool.store(transports) as store, pool.alone("store-0") as alone:
            assert [alone.get(name) for name in read] == [None] * len(read)
            assert set(pool.verify("store-0")) == {plain_key(name) for name in verified}
            assert all(store.get(name) == value_of(name) for name in names)
        counters = pool.stats("store-0").counters
        assert counters["disk_reads_failed"] == len(read)
        assert counters["integrity_failures"] == len(verified)
        pool.audit([], held=names)


def put_at(pool: Pool, node_id: str) -> list[bytes]:
    """Stores three times as many bytes as the node's memory holds."""
    with pool.alone(node_id) as store:
        return put_many(store, "running", 80, 300_000)


def rot(pool: Pool, node_id: str, name: bytes) -> None:
    value = value_of(name)
    offsets = {path: path.read_bytes().find(value) for path in segments(pool.disks[node_id])}
    path = max(offsets, key=offsets.__getitem__)
    flip(path, offsets[path] + len(value) // 2)
