"""What a cluster's processes say of their pools and counters, asked over gRPC."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from protocol.ids import new_id
from protocol.keys import KEY_BYTES, BlockKey, block_keys, root_key
from protocol.pb import kvstore_pb2, kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc
from protocol.rpc import Channels
from tests.e2e.cluster import Cluster
from tests.patience import PATIENCE_S

LANDING_TTL_S = 60.0
"""The longest that a decode worker grants without hearing of it again."""


class HeldLanding:
    """Blocks of a decode worker that are this test's for as long as it renews its lease and releases nothing: what a
    prefill worker has whose prompt takes long."""

    def __init__(
        self, runner: asyncio.Runner, channels: Channels, address: str, fingerprint: str
    ) -> None:
        self._runner = runner
        self._channels = channels
        self._stub: worker_pb2_grpc.LandingAsyncStub = worker_pb2_grpc.LandingStub(
            channels.to(address)
        )
        self._fingerprint = fingerprint
        self._lease_id = new_id("lease")

    def reserve(self, num_blocks: int, block_size: int) -> None:
        """Of fresh keys, so that nothing cached is shared."""
        request = worker_pb2.ReserveRequest(
            lease_id=self._lease_id,
            request_id=new_id("req"),
            fingerprint=self._fingerprint,
            num_tokens=num_blocks * block_size,
            block_keys=secrets.token_bytes(num_blocks * KEY_BYTES),
            ttl_s=LANDING_TTL_S,
        )
        lease = self._call(self._stub.Reserve, request)
        assert len(lease.block_ids) == num_blocks

    def renew(self) -> None:
        """To be called while it is waited for something, now and then."""
        request = worker_pb2.RenewRequest(lease_id=self._lease_id, ttl_s=LANDING_TTL_S)
        self._call(self._stub.Renew, request)

    def release(self) -> None:
        self._call(self._stub.Release, worker_pb2.ReleaseRequest(lease_id=self._lease_id))

    def _call(self, method: Any, request: Any) -> Any:
        return self._runner.run(self._channels.call(method, request, timeout_s=PATIENCE_S))


class Accounts:
    """Asks each time anew where an instance is, since a restarted one has another address."""

    def __init__(self, cluster: Cluster, runner: asyncio.Runner, channels: Channels) -> None:
        self._cluster = cluster
        self._runner = runner
        self._channels = channels

    def worker(self, instance_id: str) -> worker_pb2.WorkerStatus:
        channel = self._channels.to(self._address(instance_id))
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        return self._runner.run(
            self._channels.call(stub.GetStatus, worker_pb2.GetStatusRequest(), timeout_s=PATIENCE_S)
        )

    def store(self, instance_id: str = "store-0") -> kvstore_pb2.StoreStatsReply:
        stub = self._store_stub(instance_id)
        return self._runner.run(
            self._channels.call(stub.Stats, kvstore_pb2.StoreStatsRequest(), timeout_s=PATIENCE_S)
        )

    def places(self, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """(offset, length) of the objects of these keys in store-0's memory; of the leading ones that it has."""
        return self._runner.run(self._places(keys))

    async def _places(self, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        call, stub = self._channels.call, self._store_stub("store-0")
        request = kvstore_pb2.StoreLeaseRequest(lease_id="test", keys=keys, ttl_s=60)
        reply = await call(stub.Lease, request, timeout_s=PATIENCE_S)
        release = kvstore_pb2.StoreReleaseRequest(lease_id="test")
        await call(stub.Release, release, timeout_s=PATIENCE_S)
        return [(stored.offset, stored.length) for stored in reply.objects]

    def wait_until_stored(self, prompts: Iterable[Sequence[int]], block_size: int) -> None:
        """All full blocks of these prompts are in store-0, and the conductor knows. Not so many of anybody's."""
        with self._cluster.client() as client:
            root = root_key(client.get("/v1/cluster").json()["fingerprint"])
        for keys in (block_keys(root, prompt, block_size) for prompt in prompts):
            if keys:
                self._cluster.wait_for(
                    "the write-behind", lambda keys=keys: len(self.places(keys)) == len(keys)
                )
        num_objects = self.store().num_objects
        self._cluster.wait_for("the index", lambda: self._num_indexed() >= num_objects)

    def _num_indexed(self) -> int:
        """How many blocks the conductor knows to be in the store."""
        stores = [each for each in self._cluster.instances() if each["role"] == "store"]
        return sum(store["indexed_blocks"] for store in stores)

    def counter(self, instance_id: str, name: str) -> int:
        """0 for one that has not been counted yet."""
        is_store = instance_id.startswith("store")
        status = self.store(instance_id) if is_store else self.worker(instance_id)
        return dict(status.counters).get(name, 0)

    @contextmanager
    def landing(self, instance_id: str, num_blocks: int, block_size: int) -> Iterator[HeldLanding]:
        """So many blocks of a decode worker are taken within the block, for as long as they are renewed."""
        with self._cluster.client() as client:
            fingerprint = client.get("/v1/cluster").json()["fingerprint"]
        address = self._address(instance_id)
        landing = HeldLanding(self._runner, self._channels, address, fingerprint)
        landing.reserve(num_blocks, block_size)
        try:
            yield landing
        finally:
            landing.release()

    def in_use(self) -> list[str]:
        """What is not free, per instance; empty when everything has been given back and all are members."""
        roles = {each["instance_id"]: each["role"] for each in self._cluster.instances()}
        found: list[str] = []
        for name in self._cluster.pids():
            if name not in roles and name.startswith(("prefill", "decode", "store")):
                found.append(f"{name} is no member")
            elif name in roles:
                found += self._store_use(name) if roles[name] == "store" else self._use(name)
        return found

    def _use(self, name: str) -> list[str]:
        status = self.worker(name)
        load = status.load
        counted = load.free_blocks + load.held_blocks + load.leased_blocks
        assert counted == status.num_blocks, f"{name} lost blocks: {status}"
        busy = load.held_blocks or load.leased_blocks or load.num_waiting or load.num_running
        return [f"{name}: {load}"] if busy else []

    def _store_use(self, name: str) -> list[str]:
        stats = self.store(name)
        counted = stats.free_bytes + stats.held_bytes + stats.leased_bytes + stats.reserved_bytes
        assert counted == stats.capacity_bytes, f"{name} lost bytes: {stats}"
        return [f"{name}: {stats}"] if stats.leased_bytes or stats.reserved_bytes else []

    def wait_until_all_is_free(self, timeout_s: float = PATIENCE_S) -> None:
        """Fails when a pool still holds something for a request after this time."""
        self._cluster.wait_for("all pools free", lambda: not self.in_use(), timeout_s)

    def _address(self, instance_id: str) -> str:
        address: str = self._cluster.instance(instance_id)["rpc_address"]
        return address

    def _store_stub(self, instance_id: str) -> kvstore_pb2_grpc.KvStoreAsyncStub:
        channel = self._channels.to(self._address(instance_id))
        stub: kvstore_pb2_grpc.KvStoreAsyncStub = kvstore_pb2_grpc.KvStoreStub(channel)
        return stub


@contextmanager
def accounts_of(cluster: Cluster) -> Iterator[Accounts]:
    """Ready to ask, with channels of its own."""
    channels = Channels(cluster.token)
    with asyncio.Runner() as runner:
        try:
            yield Accounts(cluster, runner, channels)
        finally:
            runner.run(channels.close())
