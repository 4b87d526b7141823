"""A minimal prefill worker: computes prompts with its own engine and hands them off over real sockets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.batch import Slice
from engine.config import load_model_config
from engine.engine import Engine
from engine.generate import generate
from protocol.checksum import checksum
from protocol.ids import RequestId, new_id
from protocol.keys import block_keys, pack_keys, pack_tokens, root_key
from protocol.layout import KvLayout
from protocol.pb import worker_pb2, worker_pb2_grpc
from protocol.request import Request, SamplingParams
from protocol.rpc import Channels
from protocol.wire import sampling_to_wire
from tests.engine.kernels.calls import kernels_folder
from tests.patience import PATIENCE_S
from transfer import Op, RemoteSegment, Segment, Transfer, TransferEngine

BLOCK_SIZE = 8
NUM_BLOCKS = 64
TOKEN = "secret"


def load_engine(
    path: Path,
    num_blocks: int,
    memory: memoryview | None = None,
    kv_dtype: str = "auto",
    device: str = "cpu",
) -> Engine:
    """Computes in float32, and, where KV is quantised, with native kernels: there a row's bits do not depend on its
    batch, and so codes do not either."""
    layout = layout_of(path, kv_dtype)
    return Engine.load(
        path,
        config=load_model_config(path),
        layout=layout,
        dtype="float32",
        num_blocks=num_blocks,
        memory=memory,
        device=device,
        cache_folder=kernels_folder() if layout.is_quantised else None,
    )


def layout_of(path: Path, kv_dtype: str = "auto") -> KvLayout:
    return load_model_config(path).kv_layout(BLOCK_SIZE, "float32", kv_dtype)


def coupled(engine: Engine, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The reference: greedy tokens of one sequence alone in one engine. Overwrites the engine's pool."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    (generation,) = generate(engine, [prompt], sampling)
    return list(generation.token_ids)


@dataclass
class Prompt:
    """What this client computed for one request, in its own blocks from 0 on."""

    request: Request
    lease_id: str


class PrefillClient:
    """One request at a time."""

    def __init__(
        self,
        path: Path,
        transfer: TransferEngine,
        channels: Channels,
        address: str,
        kv_dtype: str = "auto",
    ) -> None:
        self.layout = layout_of(path, kv_dtype)
        self.segment: Segment = transfer.allocate(self.layout.pool_bytes(NUM_BLOCKS))
        self.engine = load_engine(path, NUM_BLOCKS, self.segment.buffer, kv_dtype)
        self.root = root_key(self.engine.fingerprint)
        self.channels = channels
        self.transfer = transfer
        self.landing = worker_pb2_grpc.LandingStub(channels.to(address))
        self.worker = worker_pb2_grpc.WorkerStub(channels.to(address))

    def compute(self, token_ids: Sequence[int], max_tokens: int, **wishes: object) -> Prompt:
        """Fills own blocks with the prompt's KV and samples the first token."""
        sampling = wishes.pop("sampling", SamplingParams(max_tokens=max_tokens, temperature=0.0))
        assert isinstance(sampling, SamplingParams)
        piece = Slice(
            request_id=RequestId("prefill"),
            token_ids=token_ids,
            start=0,
            end=len(token_ids),
            block_table=range(NUM_BLOCKS),
            sampling=sampling,
            num_prompt_tokens=len(token_ids),
            samples=True,
        )
        (first,) = self.engine.execute([piece])
        assert first is not None
        values = {
            "request_id": new_id("req"),
            "gateway_id": "gateway-0",
            "sampling": sampling,
            **wishes,
        }
        request = Request(
            token_ids=(*token_ids, first.token_id),
            num_prompt_tokens=len(token_ids),
            block_keys=tuple(block_keys(self.root, token_ids, BLOCK_SIZE)),
            **values,  # type: ignore[arg-type]
        )
        return Prompt(request, new_id("lease"))

    async def reserve(
        self,
        prompt: Prompt,
        *,
        ttl_s: float = 30.0,
        timeout_s: float = PATIENCE_S,
        fingerprint: str = "",
    ) -> worker_pb2.LandingLease:
        message = worker_pb2.ReserveRequest(
            lease_id=prompt.lease_id,
            request_id=prompt.request.request_id,
            fingerprint=fingerprint or self.engine.fingerprint,
            num_tokens=len(prompt.request.token_ids) - 1,
            block_keys=pack_keys(prompt.request.block_keys),
            ttl_s=ttl_s,
        )
        return await self.channels.call(self.landing.Reserve, message, timeout_s=timeout_s)

    async def write(
        self, prompt: Prompt, lease: worker_pb2.LandingLease, indexes: Sequence[int] | None = None
    ) -> None:
        """Writes the blocks that are not cached there, valid tokens only."""
        chosen = range(lease.num_cached_blocks, len(lease.block_ids))
        transfers = [
            self._transfer(prompt, lease, index, piece)
            for index in (chosen if indexes is None else indexes)
            for piece in range(self.layout.pieces_per_block)
        ]
        if transfers:
            await self.transfer.submit(transfers, deadline_s=PATIENCE_S)

    def _transfer(
        self, prompt: Prompt, lease: worker_pb2.LandingLease, index: int, piece: int
    ) -> Transfer:
        return Transfer(
            op=Op.WRITE,
            local=self.segment,
            local_offset=self.layout.pool_offset(NUM_BLOCKS, piece, index),
            remote=RemoteSegment(lease.transfer_address, lease.segment_id),
            remote_offset=self.layout.pool_offset(lease.num_blocks, piece, lease.block_ids[index]),
            length=self._valid_bytes(prompt, index),
            window_id=lease.window_id,
        )

    def _valid_bytes(self, prompt: Prompt, index: int) -> int:
        num_tokens = len(prompt.request.token_ids) - 1
        return min(BLOCK_SIZE, num_tokens - index * BLOCK_SIZE) * self.layout.token_bytes

    def checksum(self, prompt: Prompt, index: int) -> int:
        length = self._valid_bytes(prompt, index)
        offsets = (
            self.layout.pool_offset(NUM_BLOCKS, piece, index)
            for piece in range(self.layout.pieces_per_block)
        )
        return checksum(self.segment.buffer[at : at + length] for at in offsets)

    async def commit(self, prompt: Prompt, lease: worker_pb2.LandingLease) -> list[int]:
        """Indexes of corrupt blocks."""
        request = prompt.request
        indexes = range(lease.num_cached_blocks, len(lease.block_ids))
        message = worker_pb2.CommitRequest(
            lease_id=lease.lease_id,
            request_id=request.request_id,
            gateway_id=request.gateway_id,
            token_ids=pack_tokens(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            block_keys=pack_keys(request.block_keys),
            checksums=[self.checksum(prompt, index) for index in indexes],
            sampling=sampling_to_wire(request.sampling),
            priority=request.priority,
            timeout_s=request.timeout_s,
        )
        reply = await self.channels.call(self.landing.Commit, message, timeout_s=PATIENCE_S)
        return list(reply.corrupt)

    async def hand_off(self, prompt: Prompt) -> worker_pb2.LandingLease:
        """Reserve, write, commit."""
        lease = await self.reserve(prompt)
        await self.write(prompt, lease)
        assert await self.commit(prompt, lease) == []
        return lease

    async def release(self, lease_id: str) -> None:
        message = worker_pb2.ReleaseRequest(lease_id=lease_id)
        await self.channels.call(self.landing.Release, message, timeout_s=PATIENCE_S)

    async def status(self) -> worker_pb2.WorkerStatus:
        return await self.channels.call(
            self.worker.GetStatus, worker_pb2.GetStatusRequest(), timeout_s=PATIENCE_S
        )
