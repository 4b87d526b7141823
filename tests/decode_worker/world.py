"""Decode worker in the test's process, with real sockets, real memory and a tiny model, a client and a listener."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from moonserve.decode_worker.block_verifier import BlockVerifier
from moonserve.decode_worker.decisions.events import StepDone, StepFailed
from moonserve.decode_worker.service import DecodeService
from moonserve.decode_worker.step_runner import StepRunner
from moonserve.prefill_worker.decisions.events import CommitHandoff, Landing, ReserveLanding
from moonserve.prefill_worker.decode_client import DecodeClient
from moonserve.prefill_worker.kv_writes import KvRoute, token_runs
from moonserve.protocol.pb import worker_pb2, worker_pb2_grpc
from moonserve.protocol.request import Endpoint, LeaseId, Request, new_id
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.transfer import TransferEngine
from moonserve.worker.process import KvMemory
from tests.engine.steps import make_slice
from tests.patience import PATIENCE_S
from tests.prefill_worker.builders import make_request
from tests.worker.parts import BLOCK_SIZE, TOKEN, Ears, coupled, decoding, layout_of, listening, load_engine, status_of


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed * 37 + 11 * i * i + 5 * i) % 250 for i in range(length)]


@dataclass
class World:
    """A decode worker, a prefill client and a gateway's event listener."""

    client: "PrefillClient"
    ears: Ears
    service: DecodeService

    async def tokens(self, prompt: "Prompt") -> list[int]:
        """Returns all tokens of a request once it has finished. The first one is sampled by the client."""
        return [prompt.first_token_id, *await self.ears.all_tokens(prompt.name)]

    async def complete(self, prompt: "Prompt") -> list[int]:
        await self.client.hand_off(prompt)
        return await self.tokens(prompt)

    def expected(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        return coupled(self.client.engine, prompt, num_tokens)

    async def idle(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.service.drained()
        state = self.service.state
        state.validate()
        assert state.pool.num_free == state.pool.num_blocks


@asynccontextmanager
async def world(path: Path, *, kv_dtype: str = "auto", **options: Any) -> AsyncIterator[World]:
    """Starts a decode worker with the given `options`, a client and a listener."""
    ears = Ears()
    with TransferEngine(cluster_token=TOKEN) as sender:
        async with Channels(TOKEN) as channels, decoding(path, kv_dtype=kv_dtype, **options) as (endpoint, service):
            client = PrefillClient(path, sender, channels, endpoint, kv_dtype)
            async with listening(ears, channels, endpoint):
                yield World(client, ears, service)


async def until_counted(w: World, counter: str) -> None:
    """Runs three sequences in a pool that is too small for them until `counter` is positive. Their tokens must equal
    those of each sequence alone. Whether the sequences overlap depends on timing, so up to 20 rounds are run."""
    expected = {seed: w.expected(prompt_of(14, seed), 40) for seed in range(3)}
    for _ in range(20):
        prompts = {}
        for seed in expected:
            prompts[seed] = w.client.compute(prompt_of(14, seed), 40)
            await w.client.hand_off(prompts[seed])
        for seed, prompt in prompts.items():
            assert await w.tokens(prompt) == expected[seed]
        await w.idle()
        if w.service.state.counter_values()[counter]:
            return
    raise AssertionError(f"no {counter}")


NUM_BLOCKS = 64


@dataclass(frozen=True)
class Prompt:
    """A request whose prompt the client has computed, in its own blocks from 0 on."""

    request: Request
    lease_id: LeaseId
    first_token_id: int

    @property
    def name(self) -> str:
        return self.request.request_id


class PrefillClient:
    """Prefill worker's side of a handoff, with one request at a time."""

    def __init__(
        self, path: Path, transfer: TransferEngine, channels: Channels, decode: Endpoint, kv_dtype: str = "auto"
    ) -> None:
        self.layout = layout_of(path, kv_dtype)
        segment = transfer.allocate(self.layout.pool_bytes(NUM_BLOCKS))
        self.memory = KvMemory(segment, self.layout, NUM_BLOCKS)
        self.engine = load_engine(path, NUM_BLOCKS, segment.buffer, kv_dtype=kv_dtype)
        self.decode = decode
        self.channels = channels
        self.transfer = transfer
        self.worker = worker_pb2_grpc.WorkerStub(channels.to(decode.rpc_address))

    def _landings(self, fingerprint: str = "") -> DecodeClient:
        known = fingerprint or self.engine.fingerprint
        return DecodeClient(self.channels, fingerprint=known, ttl_s=30.0)

    def compute(self, token_ids: Sequence[int], max_tokens: int, **wishes: Any) -> Prompt:
        """Fills the client's own blocks with the prompt's KV and samples the first token."""
        fingerprint = self.engine.fingerprint
        request = make_request(
            new_id("req"), token_ids, max_tokens=max_tokens, block_size=BLOCK_SIZE, fingerprint=fingerprint
        )
        request = replace(request, **wishes)
        own = {"request_id": request.request_id, "sampling": request.sampling}
        (first,) = self.engine.execute([make_slice(token_ids, 0, len(token_ids), range(NUM_BLOCKS), **own)])
        return Prompt(request, LeaseId(new_id("lease")), first.token_id)

    async def reserve(self, prompt: Prompt, *, fingerprint: str = "") -> Landing:
        request = prompt.request
        wish = ReserveLanding(
            request_id=request.request_id,
            lease_id=prompt.lease_id,
            decode=self.decode,
            num_tokens=len(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.sampling.max_tokens,
            tenant=request.tenant,
            priority=request.priority,
            block_keys=request.block_keys,
            timeout_s=PATIENCE_S,
        )
        return await self._landings(fingerprint).reserve(wish)

    async def write(self, prompt: Prompt, landing: Landing) -> None:
        """Writes the blocks that the decode worker does not have cached, valid tokens only."""
        first, end = landing.num_cached_blocks * BLOCK_SIZE, len(prompt.request.token_ids)
        if first < end:
            own = range(NUM_BLOCKS)[: len(landing.block_ids)]
            runs = token_runs(own, landing.block_ids, first, end, self.layout)
            pieces = range(self.layout.pieces_per_block)
            write = KvRoute(self.memory, landing, runs).transfer(pieces)
            await self.transfer.submit([write], deadline_s=PATIENCE_S)

    async def commit(self, prompt: Prompt, landing: Landing) -> tuple[int, ...]:
        """Commits a handoff and returns the indexes of corrupt blocks."""
        verifier = BlockVerifier(self.memory.segment.buffer, self.layout, NUM_BLOCKS)
        num_tokens = len(prompt.request.token_ids)
        checksums = [
            verifier.checksum(index, min(BLOCK_SIZE, num_tokens - index * BLOCK_SIZE))
            for index in range(landing.num_cached_blocks, len(landing.block_ids))
        ]
        handoff = CommitHandoff(
            request=prompt.request,
            decode=self.decode,
            lease_id=prompt.lease_id,
            first_token_id=prompt.first_token_id,
            num_cached_blocks=landing.num_cached_blocks,
            checksums=tuple(checksums),
            timeout_s=prompt.request.timeout_s,
            transfer_s=0.0,
        )
        return await self._landings().commit(handoff)

    async def hand_off(self, prompt: Prompt) -> Landing:
        """Reserves a landing, writes the blocks and commits."""
        landing = await self.reserve(prompt)
        await self.write(prompt, landing)
        assert await self.commit(prompt, landing) == ()
        return landing

    async def release(self, prompt: Prompt) -> None:
        await self._landings().release(self.decode, prompt.lease_id)

    async def cancel(self, prompt: Prompt) -> None:
        request = worker_pb2.CancelRequest(request_id=prompt.name)
        await self.channels.call(self.worker.Cancel, request, timeout_s=PATIENCE_S)

    async def status(self) -> worker_pb2.WorkerStatus:
        return await status_of(self.channels, self.decode)


def hold_steps(monkeypatch: pytest.MonkeyPatch) -> asyncio.Semaphore:
    """Holds back the results of steps. Each `release` of the returned semaphore lets one through."""
    let_go, outcomes = asyncio.Semaphore(0), StepRunner.outcomes

    async def held(stepping: StepRunner) -> AsyncIterator[StepDone | StepFailed]:
        async for outcome in outcomes(stepping):
            await let_go.acquire()
            yield outcome

    monkeypatch.setattr(StepRunner, "outcomes", held)
    return let_go
