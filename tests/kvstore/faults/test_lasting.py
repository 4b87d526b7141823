"""Pins and draining are set once and persist over a node's restarts."""

from pathlib import Path

import pytest

from moonserve.kvstore.client import plain_key
from moonserve.protocol.errors import Overloaded
from moonserve.protocol.pb import kvstore_pb2 as pb
from tests.kvstore.faults.pool import Pool, running_pool, until_on_disk
from tests.kvstore.faults.values import put_many

ON_DISK = ("--dram", "64MiB", "--ssd-write-through")


def pins_of(pool: Pool, names: list[bytes]) -> list[int]:
    pins = {each.key: each.pin for each in pool.objects("store-0")}
    return [pins[plain_key(name)] for name in names]


def test_a_pin_that_was_changed_after_the_object_was_written_outlasts_a_crash(tmp_path: Path) -> None:
    with running_pool(tmp_path, 1, *ON_DISK, ssd="64MiB") as pool:
        with pool.store() as store:
            names = put_many(store, "pinned", 3, 10_000)
            until_on_disk(pool, "store-0", names)
            store.pin(names[:2], "hard")
            store.pin(names[1:], "soft")
        for _ in range(2):
            pool.restart("store-0")
            wanted = [pb.STORE_PIN_HARD, pb.STORE_PIN_SOFT, pb.STORE_PIN_SOFT]
            assert pins_of(pool, names) == wanted
        with pool.store() as store:
            store.pin(names, "none")
        pool.restart("store-0")
        assert pins_of(pool, names) == [pb.STORE_PIN_NONE] * 3
        pool.audit([], held=names)


def test_a_node_that_is_being_drained_still_is_after_a_restart(tmp_path: Path) -> None:
    with running_pool(tmp_path, 1, "--dram", "8MiB", ssd="64MiB") as pool:
        pool.ask("store-0", "SetDraining", pb.StoreSetDrainingRequest(draining=True))
        pool.restart("store-0")
        assert pool.stats("store-0").draining
        with pool.alone("store-0") as store, pytest.raises(Overloaded):
            store.put(b"key", b"value")
        pool.ask("store-0", "SetDraining", pb.StoreSetDrainingRequest(draining=False))
        pool.restart("store-0")
        assert not pool.stats("store-0").draining
        with pool.alone("store-0") as store:
            store.put(b"key", b"value")
