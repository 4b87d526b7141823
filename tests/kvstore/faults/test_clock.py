"""A wall clock that jumps, forwards and backwards: rights, generations and membership do not follow it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kvstore.faults.clocks import DAY_S, jump, shifted
from tests.kvstore.faults.pool import Pool, running_pool, until_on_disk
from tests.kvstore.faults.values import Load, put_many

RENEWALS_S = 4.0
"""Each member renews its lease within it."""


@pytest.mark.parametrize("step_s", [3 * DAY_S, -3 * DAY_S])
def test_a_clock_that_jumps_ends_no_right_and_no_membership(tmp_path: Path, step_s: int) -> None:
    environment = shifted(tmp_path / "site", 0, step_s)
    with running_pool(tmp_path, 2, "--dram", "64MiB", environment=environment) as pool:
        with pool.store() as store, Load(store, "jump") as load:
            load.go_on(10)
            [name] = put_many(store, "leased", 1, 100_000)
            before = {node.address for node in store.nodes()}
            with store.lease([name], ttl_s=30.0) as lease:
                jump(pool)
                load.go_on_for(RENEWALS_S)
                lease.check()
                assert sum(pool.stats(node_id).leased_bytes for node_id in pool.running)
            assert {node.address for node in store.nodes()} == before
            assert not load.errors
            assert not load.missed
        pool.audit([], held=load.stored, gone=load.removed)


def test_of_two_values_of_a_key_the_later_one_counts_whatever_the_clock_said(
    tmp_path: Path,
) -> None:
    """Each life of the node is a day before the one it follows."""
    flags = ("--dram", "64MiB", "--ssd-write-through")
    with running_pool(tmp_path, 1, *flags, ssd="64MiB") as pool:
        kept: list[bytes] = []
        for life in range(3):
            replaced(pool, life)
            with pool.store() as store:
                kept += put_many(store, f"life {life}", 10, 10_000)
            until_on_disk(pool, "store-0", kept)
            pool.environment = shifted(tmp_path / "site", -(life + 1) * DAY_S, 0)
            pool.restart("store-0")
            with pool.store() as store:
                assert store.get(b"replaced") == b"value %d" % life
        pool.audit([], held=kept)


def replaced(pool: Pool, life: int) -> None:
    """The value of one key is taken away and another one put in its place."""
    with pool.store() as store:
        assert store.remove(b"replaced") == (life > 0)
        store.put(b"replaced", b"value %d" % life)
    until_on_disk(pool, "store-0", [b"replaced"])
