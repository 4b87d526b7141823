"""A bit that flips in a node's memory, and is looked for. Readers who find one are in tests/kvstore/client."""

from __future__ import annotations

from pathlib import Path

from kvstore.client import plain_key
from protocol.pb import kvstore_pb2 as pb
from tests.kvstore.faults.pool import Pool, running_pool
from tests.kvstore.faults.values import put_many

DRAM = 8 * 2**20


def test_a_bit_that_flips_in_memory_is_found_by_verifying_and_costs_one_object(
    tmp_path: Path,
) -> None:
    with running_pool(tmp_path, 1, "--dram", str(DRAM), ssd="64MiB") as pool:
        with pool.store() as store:
            names = put_many(store, "flipped", 5, 300_000)
        rot(pool, names[2])
        assert pool.verify("store-0") == [plain_key(names[2])]
        assert pool.stats("store-0").counters["integrity_failures"] == 1
        kept = {*names} - {names[2]}
        assert pool.audit(names, held=kept) == kept
        pool.stop("store-0")
        pool.restart("store-0")
        assert pool.audit(names, held=kept) == kept


def rot(pool: Pool, name: bytes) -> None:
    """In the midst of the object, behind the node's back."""
    request = pb.StoreLeaseRequest(lease_id=f"rot {name!r}", keys=[plain_key(name)], ttl_s=5.0)
    [stored] = pool.ask("store-0", "Lease", request).objects
    pool.ask("store-0", "Release", pb.StoreReleaseRequest(lease_id=request.lease_id))
    pool.running["store-0"].flip_byte(stored.offset + stored.length // 2, DRAM)
