"""Sends invalid calls to a running node: each is refused as the caller's error, and the node's accounting stays right.

The calls bypass the client. Arguments that clients refuse themselves are tested in tests/kvstore/client.
"""

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest

from moonserve.protocol.errors import InvalidRequest, MoonserveError, PeerLost, StaleLease
from moonserve.protocol.pb import kvstore_pb2 as pb
from tests.kvstore.faults.pool import Pool, running_pool

DRAM = 8 * 2**20
KEY = bytes([1]) * 16


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with running_pool(tmp_path_factory.mktemp("input"), 1, "--dram", str(DRAM), ssd="64MiB") as pool:
        yield pool


def reserving(length: int, key: bytes = KEY, **fields: Any) -> pb.StoreReserveRequest:
    of_wish = {name: fields.pop(name) for name in ("parent", "tenant", "pin") if name in fields}
    wish = pb.StoreReserveRequest.Wish(key=key, length=length, **of_wish)
    return pb.StoreReserveRequest(**{"reservation_id": os.urandom(8).hex(), "ttl_s": 5.0, **fields}, wishes=[wish])


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
    "fewer checksums than keys": ("Commit", pb.StoreCommitRequest(reservation_id="unknown", keys=[KEY])),
    "a commit of nobody's": ("Commit", pb.StoreCommitRequest(reservation_id="unknown", keys=[KEY], checksums=[0])),
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
def test_invalid_input_is_refused_without_effect(pool: Pool, what: str) -> None:
    method, request = SENSELESS[what]
    before = pool.stats("store-0")
    with pytest.raises((InvalidRequest, StaleLease, PeerLost)) as caught:
        pool.ask("store-0", method, request)
    assert "internal" not in str(caught.value)
    after = pool.stats("store-0")
    assert (after.free_bytes, after.reserved_bytes) == (before.free_bytes, before.reserved_bytes)
    pool.add_up()


@pytest.mark.parametrize("wait_s", [-1.0, math.nan, math.inf])
def test_a_writer_waits_for_another_only_until_its_deadline(pool: Pool, wait_s: float) -> None:
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


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Touch", pb.StoreTouchRequest(keys=KEY)),
        ("Prefetch", pb.StorePrefetchRequest(keys=[KEY])),
        ("Release", pb.StoreReleaseRequest(lease_id="unknown")),
        ("Abort", pb.StoreAbortRequest(reservation_id="unknown")),
    ],
)
def test_unknown_keys_are_no_error(pool: Pool, method: str, request_: Any) -> None:
    pool.ask("store-0", method, request_)
    pool.add_up()
