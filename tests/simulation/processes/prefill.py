"""A prefill worker of a simulated cluster."""

from __future__ import annotations

import asyncio
from typing import Any

from engine.block_pool import BlockPool
from kvstore.client.blocks import BlockStores
from prefill_worker.landing_client import LandingClient
from prefill_worker.ledger import Limits as PrefillLimits
from prefill_worker.service import PrefillService
from prefill_worker.servicer import PrefillServicer
from prefill_worker.state import PrefillState
from protocol.ids import Role, new_id
from protocol.keys import BlockKey
from protocol.membership import BlockLog
from protocol.pb import common_pb2, conductor_pb2, worker_pb2_grpc
from tests.simulation.model import FINGERPRINT, LAYOUT, VOCABULARY
from tests.simulation.processes.member import PREFILL, Worker
from tests.simulation.processes.process import until
from transfer.config import Patience
from worker.memory import KvMemory


class Prefill(Worker):
    role = Role.PREFILL

    async def start(self) -> None:
        terms = self.world.terms
        self.make_transfer()
        segment = self.transfer.allocate(LAYOUT.pool_bytes(terms.prefill_blocks))
        self.blocks = BlockLog(lambda: self.pool.keys())
        self.pool = BlockPool(terms.prefill_blocks, on_added=self.blocks.added, on_removed=self._removed)
        self.state = self.checked(self._state())
        memory = KvMemory(segment, LAYOUT, terms.prefill_blocks)  # type: ignore[arg-type]
        self.service = PrefillService(
            self.state,
            engine=self.engine(segment.buffer, terms.prefill_blocks),
            memory=memory,
            transfer=self.transfer,  # type: ignore[arg-type]
            landings=LandingClient(self.channels, fingerprint=FINGERPRINT, ttl_s=terms.landing_ttl_s),
            stores=BlockStores(
                self.channels,
                self.transfer,  # type: ignore[arg-type]
                attaches=False,
            ),
            landing_ttl_s=terms.landing_ttl_s,
            patience=Patience(base_s=terms.transfer_timeout_s),
            look_for_home=self._look,
            clock=self.life.clock,
        )
        self.finder = self.find_home(self.service.home_found)
        servicer = PrefillServicer(self.service, block_size=LAYOUT.block_size, vocab_size=VOCABULARY)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, self.server)

    def _removed(self, key: BlockKey) -> None:
        self.blocks.removed(key)
        self.state.evicted(key)

    async def drain(self) -> None:
        self.membership.draining = True
        self.membership.wake()
        self.service.drain(True)
        await until(self.service.drained())
        await self.leave()
        await self.service.stop()

    def _state(self) -> PrefillState:
        terms = self.world.terms
        return PrefillState(
            self.pool,
            PrefillLimits(
                block_size=LAYOUT.block_size,
                block_bytes=LAYOUT.block_bytes,
                max_model_len=terms.max_model_len,
                max_num_batched_tokens=terms.prefill_tokens,
                max_num_seqs=terms.max_num_seqs,
                max_put_blocks=4,
                max_pending_puts=16,
                layered_loads="never",
            ),
            lease_prefix=new_id(self.life.name),
            profile=PREFILL,
            home_store=self.home,
        )

    def _look(self) -> None:
        if self.finder is not None:
            self.finder.look()

    def registration(self) -> conductor_pb2.RegisterRequest:
        request = self.as_worker(self.world.terms.prefill_blocks)
        request.role = common_pb2.ROLE_PREFILL
        request.home_store = self.home or ""
        request.max_num_batched_tokens = self.world.terms.prefill_tokens
        return request

    def load(self) -> conductor_pb2.Load:
        return self.service.load()

    def watched(self) -> list[asyncio.Future[Any]]:
        finding = [asyncio.ensure_future(self.finder.run())] if self.finder else []
        return [self.service.failed, *finding]

    def validate(self) -> None:
        self.state.validate()

    def unrest(self) -> str:
        held = self.state.num_held_blocks
        return "" if self.state.is_idle and not held else f"{held} blocks held by {self._who()}"

    def _who(self) -> str:
        sequences = self.state._ledger.sequences.values()
        return ", ".join(f"{each.request_id} {each.phase}" for each in sequences)
