"""Nodes that are away while keys are removed or replaced: no old value is visible when they return, and pins and
draining, which are set once, persist."""

from pathlib import Path

import pytest

from moonserve.kvstore.client import KvStore, plain_key
from moonserve.protocol.errors import DeadlineExceeded, Overloaded, PeerLost
from moonserve.protocol.pb import kvstore_pb2 as pb
from tests.kvstore.faults.mounts import mounted, read_only
from tests.kvstore.faults.pool import Pool, running_pool, until_on_disk
from tests.kvstore.faults.values import put_many, value_of
from tests.patience import until

ON_DISK = ("--dram", "64MiB", "--ssd-write-through")


def put_on(pool: Pool, node_id: str, seed: str, count: int = 20) -> list[bytes]:
    with pool.alone(node_id) as store:
        names = put_many(store, seed, count, 20_000)
    if pool.ssd:
        until_on_disk(pool, node_id, names)
    return names


def remove_all(store: KvStore, names: list[bytes]) -> None:
    """Removes names while a node is unreachable, which must raise."""
    with pytest.raises((PeerLost, DeadlineExceeded)):
        store.batch_remove(names, timeout_s=10.0)


def held_by(pool: Pool, node_id: str, names: list[bytes]) -> list[bytes]:
    with pool.alone(node_id) as store:
        return [name for name in names if store.get(name) is not None]


def test_an_object_removed_while_its_node_is_dead_stays_removed(tmp_path: Path) -> None:
    with running_pool(tmp_path, 3, *ON_DISK, ssd="64MiB") as pool:
        removed = put_on(pool, "store-1", "removed")
        kept = put_on(pool, "store-1", "kept")
        with pool.store() as store:
            pool.kill("store-1")
            remove_all(store, removed)
        pool.restart("store-1")
        assert held_by(pool, "store-1", removed) == []
        assert pool.stats("store-1").num_objects == len(kept)
        pool.restart("store-1")
        pool.audit([], held=kept, gone=removed)


def test_a_node_passes_on_learned_removals_even_after_a_restart(tmp_path: Path) -> None:
    with running_pool(tmp_path, 2, *ON_DISK, ssd="64MiB") as pool:
        removed = put_on(pool, "store-1", "removed")
        with pool.store() as store:
            pool.kill("store-1")
            remove_all(store, removed)
        pool.kill("store-0")
        pool.start("store-0", "store-1")
        until(lambda: all(pool.stats(n).recovered == 1 for n in pool.running))
        pool.audit([], gone=removed)


def test_a_value_stored_anew_after_a_removal_stays(tmp_path: Path) -> None:
    """A value stored after a removal stays, at the node that was away and after restarts: a removal runs only once."""
    with running_pool(tmp_path, 2, *ON_DISK, ssd="64MiB") as pool:
        names = put_on(pool, "store-1", "again")
        with pool.store() as store:
            with pool.frozen("store-1"):
                remove_all(store, names)
            until(lambda: not held_by(pool, "store-1", names))
        assert put_on(pool, "store-1", "again") == names
        for node_id in ("store-0", "store-1"):
            pool.restart(node_id)
        pool.audit([], held=names)
        assert held_by(pool, "store-1", names) == names


def test_a_value_stored_during_an_absence_replaces_the_older_one(tmp_path: Path) -> None:
    with running_pool(tmp_path, 2, *ON_DISK, ssd="64MiB") as pool:
        pool.put_at("store-1", b"replaced", b"old")
        [other] = put_on(pool, "store-1", "other", 1)
        pool.kill("store-1")
        pool.put_at("store-0", b"replaced", b"new")
        pool.restart("store-1")
        with pool.alone("store-1") as store:
            assert store.get(b"replaced") is None
        with pool.store() as store:
            assert store.get(b"replaced") == b"new"
        pool.audit([], held=[other])


def test_a_node_that_was_away_for_longer_than_removals_are_kept_begins_empty(tmp_path: Path) -> None:
    with running_pool(tmp_path, 2, *ON_DISK, "--removals-kept-s", "0.1", ssd="64MiB") as pool:
        # A node that is starting itself cannot confirm that it was present meanwhile.
        until(lambda: pool.stats("store-0").recovered == 1)
        names = put_on(pool, "store-1", "old")
        pool.restart("store-1")
        assert pool.stats("store-1").num_objects == 0
        again = put_on(pool, "store-1", "fresh")
        pool.audit(names, held=again)


def test_a_node_alone_keeps_what_it_had_however_long_it_was_away(tmp_path: Path) -> None:
    with running_pool(tmp_path, 1, *ON_DISK, "--removals-kept-s", "0.1", ssd="64MiB") as pool:
        names = put_on(pool, "store-0", "old")
        pool.restart("store-0")
        pool.audit([], held=names)


@pytest.mark.slow  # the registry needs half a minute to forget the node
def test_a_node_that_was_stopped_until_it_was_forgotten_shows_nothing_old(tmp_path: Path) -> None:
    with running_pool(tmp_path, 3, "--dram", "64MiB") as pool:
        removed = put_on(pool, "store-1", "removed")
        kept = put_on(pool, "store-1", "kept")
        pool.put_at("store-1", b"replaced", b"old")
        with pool.store() as store:
            with pool.frozen("store-1"):
                until(lambda: len(store.nodes()) == 2)  # its lease lasts 10 s, readers wait 6 s more
                assert store.batch_remove(removed) == 0
                store.put(b"replaced", b"new")
            until(lambda: len(store.nodes()) == 3)
            assert [store.get(name) for name in removed] == [None] * len(removed)
            assert store.get(b"replaced") == b"new"
            assert all(store.get(name) == value_of(name) for name in kept)
        assert held_by(pool, "store-1", [*removed, *kept]) == kept
        pool.add_up()


def test_a_removal_on_a_read_only_disk_is_kept_by_other_nodes(tmp_path: Path) -> None:
    with mounted(tmp_path / "store-0", 128 * 2**20) as disk, running_pool(tmp_path, 2, *ON_DISK, ssd="64MiB") as pool:
        names = put_on(pool, "store-0", "removed", 5)
        kept = put_on(pool, "store-0", "kept", 5)
        with read_only(disk), pool.store() as store:
            with pool.alone("store-0") as alone:
                put_many(alone, "fills a segment", 20, 500_000)
            pool.until_stats("store-0", lambda stats: stats.disk_health == "read-only")
            assert store.batch_remove(names) == len(names)
            assert pool.stats("store-0").counters["removals_unsaved"] == len(names)
            pool.kill("store-0")
        pool.restart("store-0")
        pool.audit([], held=kept, gone=names)


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
        with pytest.raises(Overloaded):
            pool.put_at("store-0", b"key", b"value")
        pool.ask("store-0", "SetDraining", pb.StoreSetDrainingRequest(draining=False))
        pool.restart("store-0")
        assert not pool.stats("store-0").draining
        pool.put_at("store-0", b"key", b"value")
