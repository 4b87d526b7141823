"""A pool of store nodes with disks, and its directory with the registry: put together as their entry points do."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore import eviction
from kvstore.allocator import ALIGNMENT
from kvstore.catalog import Catalog
from kvstore.catching_up import CatchingUp
from kvstore.config import StoreConfig
from kvstore.directory.follower import STORE_ROLE, Following
from kvstore.directory.index import Directory
from kvstore.event_log import EventLog
from kvstore.generations import first_of
from kvstore.index_segment import IndexSegments
from kvstore.native.metadata import KeyIndex
from kvstore.removals import Removal
from kvstore.service import StoreService
from kvstore.state import StoreState
from kvstore.stored import Watermarks
from protocol.checksum import checksum
from protocol.ids import InstanceId
from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2_grpc, registry_pb2_grpc
from protocol.registry.base import Member
from protocol.registry.embedded import EmbeddedRegistry
from protocol.registry.remote import RemoteRegistry
from protocol.registry.seat import Seat
from protocol.registry.service import RegistryService
from tests.simulation.disk import SimulatedDisk
from tests.simulation.processes.process import Process, until_one_fails
from tests.simulation.transfer import SimulatedTransfer
from tests.simulation.truth import Shown

DIRECTORY = "directory:1"
MEMORY_UNITS, DISK_UNITS, QUOTA_UNITS = 40, 90, 24
PROVE_EVERY = 8  # changes


class PoolDirectory(Process):
    """Who is there, and who holds what; it forgets everything when it dies."""

    async def start(self) -> None:
        self.index = Directory()
        self.registry = EmbeddedRegistry(self.life.clock, lambda: self.life.epoch << 40)
        registry_pb2_grpc.add_RegistryServicer_to_server(RegistryService(self.registry), self.server)
        self._following = Following(self.index, self.channels, lambda keys: None, self.life.clock)

    async def serve(self) -> None:
        await self._following.run(self.registry)

    def knows(self, nodes: list[PoolNode]) -> bool:
        """All of them are members, and followed without a gap."""
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

    def differs_from(self, nodes: list[PoolNode]) -> str:
        """Where it does not say exactly what the nodes hold."""
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


class PoolNode(Process):
    """A store node of a pool, with a disk. Whoever holds its id keeps its folder."""

    async def start(self) -> None:
        name, rng = self.life.name, self.world.network.rng
        folder = self.world.folder / name
        folder.mkdir(exist_ok=True)
        self.transfer = SimulatedTransfer(self.world.network, self.life, self.world.engines)
        self.memory = self.transfer.allocate(MEMORY_UNITS * ALIGNMENT)
        self.indexes = IndexSegments(self.transfer, self.life.clock)  # type: ignore[arg-type]
        self.index = KeyIndex(self.indexes.allocate, self.indexes.retire)
        events, policy = EventLog(), rng.choice(eviction.POLICY_NAMES)
        self.shown = Shown(name, self.world.truth, lambda key: self.state.catalog.find(key), events)
        self.state = StoreState(
            Catalog(
                self.memory.nbytes,
                index=self.index,
                policies=lambda: eviction.make(policy),
                announce=self.shown,
                watermarks=Watermarks(evict_above=0.8, evict_share=0.1),
                quotas={"limited": QUOTA_UNITS * ALIGNMENT},
                first_generation=first_of(self.life.epoch),
            )
        )
        self.service = self._service(folder, events)
        self._prove_after_changes()
        self.disk = SimulatedDisk(
            self.world.media[name], rng, self.state.moves.relocated, self.service.mover.health_changed
        )
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(self.service, self.server)
        await self.service.remembering.load(is_first_life=self.life.epoch == 1)
        self.service.mover.expect(self.disk)
        self.state.catalog.use_disk(self.disk)
        registry = RemoteRegistry(DIRECTORY, "token", channels=self.channels)
        self.catching_up = CatchingUp(name, registry, self.service.remembering, self.state, self.channels)
        self.seat = Seat(
            registry,
            Member(endpoint=self.endpoint(self.transfer.address), role=STORE_ROLE, owner=name),
            before_rejoin=self.catching_up.before_rejoin,
        )

    def _service(self, folder: Path, events: EventLog) -> StoreService:
        write_through = self.world.network.rng.random() < 0.3
        return StoreService(
            StoreConfig(
                instance_id=self.life.name, cluster_token="token", ssd=f"{folder}:1MiB", ssd_write_through=write_through
            ),
            self.transfer,  # type: ignore[arg-type]
            self.memory,
            self.endpoint(self.transfer.address),
            self.state,
            self.indexes,
            events,
            self.life.clock,
            peers=self.channels,
        )

    def _prove_after_changes(self) -> None:
        changed, numbers = self.service._changed, itertools.count()

        def changed_and_proven() -> None:
            changed()
            if next(numbers) % PROVE_EVERY == 0:
                self.validate()

        self.service._changed = changed_and_proven  # type: ignore[method-assign]

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
        """An orderly stop: a restart finds everything again."""
        await self.service.mover.flush(DRAIN_S)

    @property
    def serves(self) -> bool:
        return super().serves and self.service.mover.recovered == 1

    def validate(self) -> None:
        self.state.validate()
        visible = list(self.state.catalog.objects())
        assert self.shown.expected == {o.key: (o.generation, o.checksum, o.tier) for o in visible}, (
            "what it announced is not what it shows"
        )
        medium = self.disk.medium
        for stored in visible:
            if stored.offset is not None:
                content = self.memory.buffer[stored.offset : stored.offset + stored.length]
                assert checksum([content]) == stored.checksum, "a visible object has other bytes"
            if stored.place is not None:
                assert stored.place in medium.live
                assert medium.kept[stored.place].generation == stored.generation

    def removals(self) -> Sequence[Removal]:
        return self.service.remembering.removals.all()

    def leftovers(self, known: set[tuple[BlockKey, int]]) -> list[str]:
        return self.world.truth.leftovers(known, self.state.catalog.objects())

    def unrest(self) -> str:
        usage, moves = self.state.catalog.usage(), self.state.moves
        places = {o.place for o in self.state.catalog.objects() if o.place is not None}
        held: dict[str, Any] = {
            "leased": usage.num_leased,
            "reserved": usage.reserved_bytes,
            "windows": sorted(self.transfer.windows),
            "stores": moves.num_stores,
            "places that nobody has": sorted(self.disk.medium.live - places),
        }
        return ", ".join(f"{value} {what}" for what, value in held.items() if value)


DRAIN_S = 3.0
