"""A decode worker's service over real sockets, real memory and a real (tiny) model, and what its gateway received."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from decode_worker.keeping import KeepingCosts
from decode_worker.limits import Limits
from decode_worker.service import DecodeService
from decode_worker.servicers import LandingServicer, LandingZone, WorkerServicer
from decode_worker.state import DecodeState
from engine.block_pool import BlockPool
from engine.runtime import EngineThread
from engine.staging import staging_of
from kvstore.block_client import BlockClient
from protocol.pb import common_pb2, worker_pb2, worker_pb2_grpc
from protocol.rpc import Channels, RpcServer
from tests.decode_worker.prefill_client import (
    BLOCK_SIZE,
    TOKEN,
    PrefillClient,
    Prompt,
    layout_of,
    load_engine,
)
from tests.patience import PATIENCE_S
from transfer import FaultPlan, TransferEngine


@dataclass
class Received:
    """What one gateway heard."""

    tokens: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # (index, token id)
    finished: dict[str, common_pb2.FinishReason] = field(default_factory=dict)
    failures: dict[str, common_pb2.Failure] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    stands: bool = False  # its stream does

    async def listen(self, client: PrefillClient, gateway_id: str) -> None:
        request = worker_pb2.EventsRequest(gateway_id=gateway_id)
        async for batch in client.channels.stream(client.worker.Events, request):
            async with self.changed:
                self._take(batch)
                self.changed.notify_all()

    def _take(self, batch: worker_pb2.EventBatch) -> None:
        self.stands = True
        for event in batch.tokens:
            entry = (event.index, event.token_id)
            self.tokens.setdefault(event.request_id, []).append(entry)
            if event.finish_reason:
                self.finished[event.request_id] = event.finish_reason
        for failed in batch.failures:
            self.failures[failed.request_id] = failed.failure

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(condition)

    async def all_of(self, prompt: Prompt) -> list[int]:
        """The tokens of a request, the first one included, once it has finished."""
        name = prompt.request.request_id
        await self.until(lambda: name in self.finished or name in self.failures)
        assert name in self.finished, self.failures[name]
        indexes = [index for index, _ in self.tokens[name]]
        assert indexes == list(range(1, len(indexes) + 1))
        return [prompt.request.token_ids[-1], *(token for _, token in self.tokens[name])]


@dataclass
class World:
    """A decode worker, a prefill client and a gateway's ears."""

    client: PrefillClient
    received: Received
    service: DecodeService
    decode_transfer: TransferEngine

    async def complete(self, prompt: Prompt) -> list[int]:
        await self.client.hand_off(prompt)
        return await self.received.all_of(prompt)

    async def idle(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.service.idle.wait()
        self.service.state.validate()
        assert self.service.state.num_free_blocks == self.service.state.num_blocks


@asynccontextmanager
async def world(
    path: Path,
    *,
    num_blocks: int = 48,
    faults: FaultPlan | None = None,
    keeping: KeepingCosts | None = None,
    kv_dtype: str = "auto",
    device: str = "cpu",
    **limits: int | bool,
) -> AsyncIterator[World]:
    bounds = Limits(
        **{
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "max_model_len": 512,
            **limits,
        }
    )
    layout = layout_of(path, kv_dtype)
    pool = BlockPool(num_blocks, on_added=lambda *_: None, on_removed=lambda _: None)
    state = DecodeState(pool, bounds, keeping=keeping)
    channels, server = Channels(TOKEN), RpcServer(TOKEN)
    stop = asyncio.Event()
    with (
        TransferEngine(cluster_token=TOKEN) as transfer,
        TransferEngine(cluster_token=TOKEN, faults=faults) as sender,
    ):
        segment = transfer.allocate(layout.pool_bytes(num_blocks))
        engine = load_engine(path, num_blocks, segment.buffer, kv_dtype, device)
        compute, staging = EngineThread(engine), staging_of(engine)
        stores = BlockClient(channels, transfer)
        service = DecodeService(
            state, compute, transfer, segment, layout, stores=stores, staging=staging
        )
        zone = LandingZone(
            transfer_address=transfer.address,
            segment_id=segment.segment_id,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            fingerprint=engine.fingerprint,
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(service), server.grpc)
        worker_pb2_grpc.add_LandingServicer_to_server(LandingServicer(service, zone), server.grpc)
        address = await server.start("127.0.0.1", 0)
        client = PrefillClient(path, sender, channels, address, kv_dtype)
        received = Received()
        work = asyncio.create_task(service.run(stop))
        ears = asyncio.create_task(received.listen(client, "gateway-0"))
        try:
            # A worker gives up the requests of a gateway that stays away for seconds.
            await received.until(lambda: received.stands)
            yield World(client, received, service, transfer)
        finally:
            stop.set()
            await asyncio.wait_for(work, PATIENCE_S)
            ears.cancel()
            await asyncio.wait({ears})
            await stores.close()
            await channels.close()
            await server.stop(0)
            service.streams.close()
            compute.close()
            staging.close()
