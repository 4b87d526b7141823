"""Simulated store nodes: a cluster's, in memory only, and a pool's, with disks, a directory and a registry."""

import itertools
from collections import Counter
from typing import Any

from moonserve.kvstore.config import StoreConfig
from moonserve.kvstore.directory.holders import Directory
from moonserve.kvstore.directory.node_follower import ClusterFollower
from moonserve.kvstore.disk.base import Health
from moonserve.kvstore.node.catch_up import CatchUp
from moonserve.kvstore.node.event_log import EventLog
from moonserve.kvstore.node.service import StoreService
from moonserve.kvstore.published_index import IndexSegments, KeyIndex
from moonserve.kvstore.state import eviction
from moonserve.kvstore.state.allocator import ALIGNMENT
from moonserve.kvstore.state.catalog_tables import first_generation_of
from moonserve.kvstore.state.objects import Watermarks
from moonserve.kvstore.state.state import StoreState
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey, checksum
from moonserve.protocol.membership.heartbeats import BlockLog
from moonserve.protocol.membership.registry import Member as Seated
from moonserve.protocol.membership.registry.client import RemoteRegistry
from moonserve.protocol.membership.registry.embedded import EmbeddedRegistry, RegistryService
from moonserve.protocol.membership.registry.lease import RegistryLease
from moonserve.protocol.pb import kvstore_pb2_grpc, registry_pb2_grpc
from moonserve.protocol.request import InstanceId, Role
from tests.kvstore.state.states import make_state
from tests.simulation.disk import SimulatedDisk
from tests.simulation.processes.members import Member
from tests.simulation.processes.process import Process, until_one_fails
from tests.simulation.truth import Shown

DIRECTORY = "directory:1"
MEMORY_UNITS, DISK_UNITS, QUOTA_UNITS = 40, 90, 24
PROVE_EVERY = 8  # a pool node is validated after this many changes
FLUSH_S = 3.0


class Node(Process):
    """Base class of store nodes. The state is validated after every `prove_every` changes."""

    def make_service(
        self, state: StoreState, memory: Any, events: EventLog, indexes: Any, prove_every: int, **options: Any
    ) -> None:
        """Creates the store's service. `options` are fields of `StoreConfig`."""
        self.state = state
        config = StoreConfig(instance_id=self.life.name, cluster_token="token", **options)
        transfer, endpoint, clock = self.transfer, self.endpoint(), self.life.clock
        service = self.service = StoreService(
            config, transfer, memory, endpoint, self.state, indexes, events, clock, peers=self.channels
        )
        changed, numbers = service._on_change, itertools.count()

        def changed_and_proven() -> None:
            changed()
            if next(numbers) % prove_every == 0:
                self.validate()

        service._on_change = changed_and_proven  # type: ignore[method-assign]
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(service, self.server)

    def unrest(self) -> str:
        usage, moves = self.state.catalog.usage(), self.state.tier_moves
        held: dict[str, Any] = {
            "leased": usage.num_leased,
            "reserved": usage.reserved_bytes,
            "windows": sorted(self.transfer.windows),
            "stores": moves.num_writes,
        }
        return ", ".join(f"{value} {what}" for what, value in held.items() if value)


class Store(Node, Member):
    role = Role.STORE

    async def start(self) -> None:
        self.make_transfer()
        memory = self.transfer.allocate(self.world.terms.store_blocks * ALIGNMENT)
        self.blocks = BlockLog(lambda: [(o.key, o.parent or NO_PARENT) for o in self.state.catalog.objects()])
        events = EventLog(self.blocks)
        marks = Watermarks(evict_above=0.9, evict_share=0.05)
        state = make_state(memory.nbytes, events, watermarks=marks, first_generation=self.life.epoch << 32)
        nobody_maps_it = None
        self.make_service(state, memory, events, nobody_maps_it, prove_every=1)


class PoolDirectory(Process):
    """Registry and block directory of a pool. It loses all state when it dies."""

    async def start(self) -> None:
        self.index = Directory()
        self.registry = EmbeddedRegistry(self.life.clock, lambda: self.life.epoch << 40)
        registry_pb2_grpc.add_RegistryServicer_to_server(RegistryService(self.registry), self.server)
        self._following = ClusterFollower(self.index, self.channels, lambda keys: None, self.life.clock)

    async def serve(self) -> None:
        await self._following.run(self.registry)

    def knows(self, nodes: "list[PoolNode]") -> bool:
        """Returns True if all nodes are members and their event logs are followed without a gap."""
        followers = self._following.followers
        return all(
            (follower := followers.get(InstanceId(node.life.name))) is not None
            and follower.in_step
            and follower.member.endpoint.rpc_address == node.address
            for node in nodes
        )

    def validate(self) -> None:
        self.registry.validate()
        self.index.validate()

    def differs_from(self, nodes: "list[PoolNode]") -> str:
        """Returns the first difference between the directory and the nodes' contents; empty if there is none."""
        held: dict[BlockKey, set[str]] = {}
        for node in nodes:
            for key in node.shown.expected:
                held.setdefault(key, set()).add(node.life.name)
        for key, holders in held.items():
            found = {*map(str, self.index.holders(key))}
            if found != holders:
                return f"the directory says {found} of {key.hex()}, nodes {holders}"
        told = {n.life.name: self.index.num_blocks(InstanceId(n.life.name)) for n in nodes}
        true = Counter(name for holders in held.values() for name in holders)
        return "" if told == {name: true[name] for name in told} else f"{told} blocks, not {true}"


class PoolNode(Node):
    """A store node of a pool, with a disk. Its folder belongs to its name and outlives its lives."""

    async def start(self) -> None:
        name, rng = self.life.name, self.world.network.rng
        folder = self.world.folder / name
        folder.mkdir(exist_ok=True)
        self.make_transfer()
        self.memory = self.transfer.allocate(MEMORY_UNITS * ALIGNMENT)
        indexes = IndexSegments(self.transfer, self.life.clock)
        self.index = KeyIndex(indexes.allocate, indexes.retire)
        events, policy = EventLog(), rng.choice(eviction.POLICY_NAMES)
        self.shown = Shown(name, self.world.truth, lambda key: self.state.catalog.find(key), events)
        state = make_state(
            self.memory.nbytes,
            self.shown,
            policy=policy,
            index=self.index,
            watermarks=Watermarks(evict_above=0.8, evict_share=0.1),
            quotas={"limited": QUOTA_UNITS * ALIGNMENT},
            first_generation=first_generation_of(self.life.epoch),
        )
        options = {"ssd": f"{folder}:1MiB", "ssd_write_through": rng.random() < 0.3}
        self.make_service(state, self.memory, events, indexes, PROVE_EVERY, **options)
        mover, remembering = self.service.mover, self.service.removal_store
        self.disk = SimulatedDisk(self.world.media[name], rng, self.state.tier_moves.relocated, mover.health_changed)
        await remembering.load(is_first_life=self.life.epoch == 1)
        mover.set_disk(self.disk)
        state.catalog.use_disk(self.disk)
        registry = RemoteRegistry(DIRECTORY, "token", channels=self.channels)
        self.catching_up = CatchUp(name, registry, remembering, self.state, self.channels)
        member = Seated(endpoint=self.endpoint(), role="store", owner=name)
        self.seat = RegistryLease(registry, member, before_rejoin=self.catching_up.before_rejoin)

    async def serve(self) -> None:
        mover = self.service.mover
        parts = (
            self.seat.run(),
            self.catching_up.run(self.seat),
            mover.recover(self.disk, lambda share: None, self.catching_up),
            self._compact(),
        )
        await until_one_fails(parts)

    async def _compact(self) -> None:
        await self.service.mover._all_found.wait()
        await self.disk.compact()

    async def drain(self) -> None:
        """Flushes memory to disk, so that a restart finds all objects again."""
        await self.service.mover.flush(FLUSH_S)

    @property
    def serves(self) -> bool:
        return super().serves and self.service.mover.recovered == 1

    def validate(self) -> None:
        self.state.validate()
        visible = list(self.state.catalog.objects())
        shown = {each.key: (each.generation, each.checksum, each.tier) for each in visible}
        assert self.shown.expected == shown, "what it announced is not what it shows"
        medium = self.disk.medium
        for stored in visible:
            if stored.offset is not None:
                content = self.memory.buffer[stored.offset : stored.offset + stored.length]
                assert checksum([content]) == stored.checksum, "a visible object has other bytes"
            if stored.place is not None:
                assert stored.place in medium.live
                assert medium.kept[stored.place].generation == stored.generation

    def unrest(self) -> str:
        places = {o.place for o in self.state.catalog.objects() if o.place is not None}
        # Writes in flight when a disk is lost leave places that belong to no object; they are ignored.
        nobodys = sorted(self.disk.medium.live - places) if self.disk.health is Health.GOOD else []
        return super().unrest() or (f"{nobodys} places that nobody has" if nobodys else "")
