"""Runs an `UndividedState`: what `decode_worker.service` does, and beside it loads, checksums, puts and reports.

Its first tokens carry the report that a prefill worker's would. To `prefill_worker.servicer` it looks like a prefill
worker's service: `post`, `status`, `streams`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from decode_worker import actions, events
from decode_worker.service import VERIFY_INLINE_BYTES, DecodeService
from decode_worker.stepping import Compute
from deploy.undivided.events import PutEnded, SealBlocks, Sealed, Submitted
from deploy.undivided.state import UndividedState
from engine.staging import InPlace, Staging
from kvstore.block_client import BlockClient
from prefill_worker import events as prefill_events
from prefill_worker.actions import LoadPrefix, PutBlocks
from prefill_worker.landing import KvMemory
from prefill_worker.stores import load_prefix, put_blocks
from protocol.layout import KvLayout
from protocol.pb import conductor_pb2, worker_pb2
from protocol.tracing import Tracer
from transfer import Segment, TransferEngine
from transfer.patience import Patience


class UndividedService(DecodeService):
    """`stores`: None = prompts are placed without sources, and nothing is put anywhere or kept."""

    def __init__(
        self,
        state: UndividedState,
        compute: Compute,
        transfer: TransferEngine,
        segment: Segment,
        layout: KvLayout,
        *,
        stores: BlockClient | None = None,
        staging: Staging | None = None,
        patience: Patience | None = None,
        look_for_home: Callable[[], None] = lambda: None,
        observe_allocation: Callable[[float], None] = lambda _: None,
        tracer: Tracer | None = None,
    ) -> None:
        self._undivided = state
        self._memory = KvMemory(segment, layout, state.num_blocks, staging=staging or InPlace())
        self._stores = stores
        self._patience = patience or Patience()
        super().__init__(
            state,
            compute,
            transfer,
            segment,
            layout,
            stores=stores,
            staging=staging,
            look_for_home=look_for_home,
            observe_allocation=observe_allocation,
            tracer=tracer,
        )

    def _table(self) -> Mapping[type[Any], Callable[[Any], None]]:
        return {
            **super()._table(),
            LoadPrefix: lambda action: self._spawn(self._then(self._load(action))),
            SealBlocks: lambda action: self._spawn(self._then(self._seal(action))),
            PutBlocks: lambda action: self._spawn(self._then(self._put(action))),
        }

    # -- what a prefill worker's servicer calls

    def post(self, event: prefill_events.Event) -> None:
        match event:
            case prefill_events.Submitted(request=request, placement=placement):
                sources = () if self._stores is None else placement.prefix_sources
                self.handle_any(Submitted(request=request, sources=sources))
            case prefill_events.CancelRequested(request_id=request_id):
                self.handle(events.RequestCancelled(request_id=request_id))

    def status(self) -> worker_pb2.WorkerStatus:
        state = self._undivided
        return worker_pb2.WorkerStatus(
            load=self.load(),
            num_blocks=state.num_blocks,
            cached_blocks=state.num_cached_blocks,
            counters={**state.counters.as_dict(), **state.publishing.counters},
        )

    def load(self) -> conductor_pb2.Load:
        load = super().load()
        load.queued_tokens = self._undivided.queued_tokens
        return load

    def handle_any(self, event: Any) -> None:
        """Events of decode workers, and of those who read prompts."""
        self.handle(event)

    # -- actions

    async def _then(self, outcome: Awaitable[Any]) -> None:
        self.handle_any(await outcome)

    async def _load(self, action: LoadPrefix) -> Any:
        assert self._stores is not None, "no sources, no loads"
        return await load_prefix(self._stores, self._memory, action, self._patience)

    async def _put(self, action: PutBlocks) -> PutEnded:
        assert self._stores is not None, "nothing is put without stores"
        outcome = await put_blocks(self._stores, self._memory, action, self._patience)
        if isinstance(outcome, prefill_events.PutFailed):
            self._look_for_home()
        return PutEnded(store_id=action.store.instance_id, outcome=outcome)

    async def _seal(self, action: SealBlocks) -> Sealed:
        await self._memory.staging.store(action.blocks)
        if len(action.blocks) * self._layout.block_bytes > VERIFY_INLINE_BYTES:
            return await asyncio.to_thread(self._sealed, action)
        return self._sealed(action)

    def _sealed(self, action: SealBlocks) -> Sealed:
        size = self._layout.block_size
        checksums = tuple(self._verifier.checksum(block, size) for block in action.blocks)
        return Sealed(seal_id=action.seal_id, checksums=checksums)

    def _send_tokens(self, action: actions.SendTokens) -> None:
        reports = [self._undivided.report(token.request_id, self.now) for token in action.tokens]
        known = [report for report in reports if report is not None]
        self.streams.send(
            action.gateway_id, tokens=action.tokens, prefills=known, decodes=action.began
        )
        for phase in action.ended:
            self._trace(phase)
