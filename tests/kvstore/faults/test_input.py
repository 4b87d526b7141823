"""Calls that make no sense, to a running node: each is refused as the caller's fault, and the node's books stay right.

What clients refuse before they ask is in tests/kvstore/client; here nobody stands in between.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.checksum import checksum
from protocol.errors import InvalidRequest, MoonserveError, Overloaded, PeerLost, StaleLease
from protocol.pb import kvstore_pb2 as pb
from tests.kvstore.client.pools import until
from tests.kvstore.faults.pool import Pool, running_pool
from tests.kvstore.faults.values import name_of, value_of
from tests.patience import PATIENCE_S

DRAM = 8 * 2**20
KEY, OTHER = bytes([1]) * 16, bytes([2]) * 16


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder: Path = tmp_path_factory.mktemp("input")
    with running_pool(folder, 1, "--dram", str(DRAM), ssd="64MiB") as pool:
        yield pool


def reserving(length: int, key: bytes = KEY, **fields: Any) -> pb.StoreReserveRequest:
    of_wish = {name: fields.pop(name) for name in ("parent", "tenant", "pin") if name in fields}
    wish = pb.StoreReserveRequest.Wish(key=key, length=length, **of_wish)
    return pb.StoreReserveRequest(
        **{"reservation_id": os.urandom(8).hex(), "ttl_s": 5.0, **fields}, wishes=[wish]
    )


def leasing(*keys: bytes, ttl_s: float = 5.0) -> pb.StoreLeaseRequest:
    return pb.StoreLeaseRequest(lease_id=os.urandom(8).hex(), keys=keys, ttl_s=ttl_s)


SENSELESS = {
    "a value larger than the memory": ("Reserve", reserving(DRAM + 1)),
    "a value of 2**63 bytes": ("Reserve", reserving(2**63)),
    "a short key": ("Reserve", reserving(1, b"short")),
    "a long key": ("Reserve", reserving(1, bytes(65 * 1024))),
    "no key": ("Reserve", reserving(1, b"")),
    "a short parent": ("Reserve", reserving(1, parent=b"short")),
    "its own parent": ("Reserve", reserving(1, parent=KEY)),
    "an unknown pin": ("Reserve", reserving(1, pin=17)),
    "a tenant whose name no disk takes": ("Reserve", reserving(1, tenant="x" * 1025)),
    "a right that has ended": ("Reserve", reserving(1, ttl_s=-1.0)),
    "a right without end": ("Reserve", reserving(1, ttl_s=math.inf)),
    "a right for no time at all": ("Reserve", reserving(1, ttl_s=math.nan)),
    "a right for too long": ("Reserve", reserving(1, ttl_s=1e9)),
    "fewer checksums than keys": (
        "Commit",
        pb.StoreCommitRequest(reservation_id="unknown", keys=[KEY]),
    ),
    "a commit of nobody's": (
        "Commit",
        pb.StoreCommitRequest(reservation_id="unknown", keys=[KEY], checksums=[0]),
    ),
    "a lease on a short key": ("Lease", leasing(b"short")),
    "a lease that has ended": ("Lease", leasing(KEY, ttl_s=-1.0)),
    "a lease without end": ("Lease", leasing(KEY, ttl_s=math.inf)),
    "a lease for no time at all": ("Lease", leasing(KEY, ttl_s=math.nan)),
    "a renewal of nobody's": ("Renew", pb.StoreRenewRequest(lease_id="unknown", ttl_s=1.0)),
    "existence of a short key": ("Exists", pb.StoreExistsRequest(keys=[b"short"])),
    "removal of a short key": ("Remove", pb.StoreRemoveRequest(keys=[b"short"])),
    "use of a short key": ("Touch", pb.StoreTouchRequest(keys=b"short")),
    "a pin of a short key": ("Pin", pb.StorePinRequest(keys=[b"short"])),
    "an unknown kind of pin": ("Pin", pb.StorePinRequest(keys=[KEY], pin=17)),
    "a prefetch of a short key": ("Prefetch", pb.StorePrefetchRequest(keys=[b"short"])),
    "a copy from nowhere": ("Copy", pb.StoreCopyRequest(keys=[KEY], deadline_s=1.0)),
}


@pytest.mark.parametrize("what", SENSELESS)
def test_what_makes_no_sense_is_refused_and_leaves_no_trace(pool: Pool, what: str) -> None:
    method, request = SENSELESS[what]
    before = pool.stats("store-0")
    with pytest.raises((InvalidRequest, StaleLease, PeerLost)) as caught:
        pool.ask("store-0", method, request)
    assert "internal" not in str(caught.value)
    after = pool.stats("store-0")
    assert (after.free_bytes, after.reserved_bytes) == (before.free_bytes, before.reserved_bytes)
    pool.add_up()


@pytest.mark.parametrize("wait_s", [-1.0, math.nan, math.inf])
def test_a_writer_cannot_wait_for_ever(pool: Pool, wait_s: float) -> None:
    held = reserving(100, b"w" * 16, ttl_s=1.0)
    pool.ask("store-0", "Reserve", held)
    waiting = reserving(100, b"w" * 16, wait_s=wait_s)
    try:
        reply = pool.ask("store-0", "Reserve", waiting, 5.0)
    except MoonserveError as error:
        assert isinstance(error, InvalidRequest), error  # noqa: PT017
    else:
        assert reply.slots[0].outcome in (1, 3)
        pool.ask("store-0", "Abort", pb.StoreAbortRequest(reservation_id=waiting.reservation_id))
    pool.ask("store-0", "Abort", pb.StoreAbortRequest(reservation_id=held.reservation_id))
    pool.add_up()


def test_unknown_keys_are_missing_and_no_error(pool: Pool) -> None:
    with pool.store() as store:
        assert store.get(b"unknown") is None
        assert not store.exists(b"unknown")
        assert not store.remove(b"unknown")
        assert store.pin([b"unknown"], "hard") == 0
        with store.lease([b"unknown"]) as lease:
            assert lease.views == (None,)
    for request, method in (
        (pb.StoreTouchRequest(keys=KEY), "Touch"),
        (pb.StorePrefetchRequest(keys=[KEY]), "Prefetch"),
        (pb.StoreReleaseRequest(lease_id="unknown"), "Release"),
        (pb.StoreAbortRequest(reservation_id="unknown"), "Abort"),
    ):
        pool.ask("store-0", method, request)
    pool.add_up()


def test_keys_over_the_limit_and_values_over_the_memory_are_refused(pool: Pool) -> None:
    with pool.store() as store:
        with pytest.raises(InvalidRequest, match="65536"):
            store.put(bytes(64 * 1024 + 1), b"x")
        with pytest.raises(InvalidRequest, match=str(DRAM)):
            store.put(b"large", bytes(DRAM + 1))
        store.put(bytes(64 * 1024), b"a key of 64 KiB")
        assert store.get(bytes(64 * 1024)) == b"a key of 64 KiB"
        segment = store.allocate(10)
        for offset, length in ((5, 6), (-1, 2), (11, 0), (0, 2**40)):
            with pytest.raises(InvalidRequest):
                store.put_from(b"beyond", segment, offset, length)
        store.put(b"ten", bytes(range(10)))
        for offset, length in ((5, 6), (-1, 2), (11, 0), (0, 2**40), (2**63, 1)):
            with pytest.raises(InvalidRequest):
                store.get_range(b"ten", offset, length)
        with pytest.raises(InvalidRequest):
            store.get_into(b"ten", segment, 1)
    pool.add_up()


def test_a_second_commit_changes_nothing_and_one_after_the_end_is_refused(pool: Pool) -> None:
    request = reserving(0, b"c" * 16)
    pool.ask("store-0", "Reserve", request)
    commit = pb.StoreCommitRequest(
        reservation_id=request.reservation_id, keys=[b"c" * 16], checksums=[checksum([b""])]
    )
    for _ in range(3):
        assert not pool.ask("store-0", "Commit", commit).corrupt
    assert pool.ask("store-0", "Exists", pb.StoreExistsRequest(keys=[b"c" * 16])).present == [True]
    late = reserving(100, b"l" * 16, ttl_s=0.1)
    pool.ask("store-0", "Reserve", late)
    until(lambda: pool.stats("store-0").reserved_bytes == 0)
    commit = pb.StoreCommitRequest(
        reservation_id=late.reservation_id, keys=[b"l" * 16], checksums=[0]
    )
    with pytest.raises(StaleLease):
        pool.ask("store-0", "Commit", commit)
    pool.add_up()


def test_what_is_removed_under_a_lease_is_missing_at_once_and_readable_to_its_end(
    pool: Pool,
) -> None:
    name = name_of("leased", 0, 300_000)
    with pool.store() as store:
        store.put(name, value_of(name))
        with store.lease([name], ttl_s=60.0) as lease:
            assert store.remove(name)
            assert store.get(name) is None
            store.put(name, b"another")
            assert lease.views[0] == value_of(name)
            assert pool.stats("store-0").leased_bytes >= 300_000
        assert store.get(name) == b"another"
        assert store.remove(name)
    pool.add_up()


def test_writers_of_one_key_at_once_all_succeed_and_one_stores(pool: Pool) -> None:
    """Each from a client of its own; all but one wait for the winner."""
    name = name_of("raced", 0, 2_000_000)
    before = pool.stats("store-0").counters["objects_stored"]
    errors: list[BaseException] = []

    def write() -> None:
        try:
            with pool.store() as store:
                store.put(name, value_of(name), timeout_s=PATIENCE_S)
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(2 * PATIENCE_S)
    assert not errors
    assert pool.stats("store-0").counters["objects_stored"] == before + 1
    pool.audit([], held=[name])


def test_a_node_full_of_leased_objects_says_so_and_recovers(pool: Pool) -> None:
    names = [name_of("filling", number, 1_500_000) for number in range(4)]
    large = name_of("large", 0, 4_000_000)
    with pool.store() as store:
        for name in names:
            store.put(name, value_of(name))
        with store.lease(names, ttl_s=60.0) as lease:
            assert None not in lease.views
            with pytest.raises(Overloaded):
                store.put(large, value_of(large), timeout_s=3.0)
        store.put(large, value_of(large), timeout_s=PATIENCE_S)
    pool.audit(names, held=[large])
