"""A store node of a simulated cluster."""

from __future__ import annotations

from typing import Any

from kvstore import eviction
from kvstore.allocator import ALIGNMENT
from kvstore.catalog import Catalog
from kvstore.config import StoreConfig
from kvstore.event_log import EventLog
from kvstore.native.metadata import KeyIndex
from kvstore.service import StoreService
from kvstore.state import StoreState
from kvstore.stored import Watermarks
from protocol.ids import Role
from protocol.keys import NO_PARENT
from protocol.membership import BlockLog
from protocol.pb import common_pb2, conductor_pb2, kvstore_pb2_grpc
from tests.simulation.processes.member import Member


class Store(Member):
    """In memory only: those with disks are a world's pool."""

    role = Role.STORE

    async def start(self) -> None:
        self.make_transfer()
        segment = self.transfer.allocate(self.world.terms.store_blocks * ALIGNMENT)
        self.blocks = BlockLog(self._inventory)
        events = EventLog(self.blocks)
        catalog = Catalog(
            segment.nbytes,
            index=KeyIndex(),
            policies=lambda: eviction.make("lru"),
            announce=events,
            watermarks=Watermarks(evict_above=0.9, evict_share=0.05),
            quotas={},
            first_generation=self.life.epoch << 32,
        )
        self.state = StoreState(catalog)
        config = StoreConfig(instance_id=self.life.name, cluster_token="token")
        self.service = StoreService(
            config,
            self.transfer,  # type: ignore[arg-type]
            segment,  # type: ignore[arg-type]
            self.endpoint(self.transfer.address),
            self.state,
            None,  # type: ignore[arg-type]  # an index that nobody here maps
            events,
            self.life.clock,
            peers=self.channels,
        )
        self._prove_after_changes()
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(self.service, self.server)

    def _prove_after_changes(self) -> None:
        changed = self.service._changed

        def changed_and_proven() -> None:
            changed()
            self.validate()

        self.service._changed = changed_and_proven  # type: ignore[method-assign]

    def _inventory(self) -> list[Any]:
        return [(stored.key, stored.parent or NO_PARENT) for stored in self.state.catalog.objects()]

    def registration(self) -> conductor_pb2.RegisterRequest:
        request = super().registration()
        request.role = common_pb2.ROLE_STORE
        return request

    def load(self) -> conductor_pb2.Load:
        return self.service.load()

    def validate(self) -> None:
        self.state.validate()

    def unrest(self) -> str:
        usage = self.state.catalog.usage()
        held = [f"{usage.num_leased} leased"] if usage.num_leased else []
        held += [f"windows {sorted(self.transfer.windows)}"] if self.transfer.windows else []
        return ", ".join(held)
