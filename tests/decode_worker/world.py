"""A decode worker's service over real sockets, real memory and a real (tiny) model, and what its gateway received."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode_worker.service import DecodeService
from protocol.rpc import Channels
from tests.decode_worker.prefill_client import PrefillClient, Prompt
from tests.patience import PATIENCE_S
from tests.worker.parts import TOKEN, Ears, coupled, decoding, listening
from transfer import FaultPlan, TransferEngine


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed * 37 + 11 * i * i + 5 * i) % 250 for i in range(length)]


@dataclass
class World:
    """A decode worker, a prefill client and a gateway's ears."""

    client: PrefillClient
    ears: Ears
    service: DecodeService

    async def tokens(self, prompt: Prompt) -> list[int]:
        """All of a request's, once it has finished; the first one came from the client."""
        return [prompt.first_token_id, *await self.ears.all_tokens(prompt.name)]

    async def complete(self, prompt: Prompt) -> list[int]:
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
async def world(
    path: Path, *, faults: FaultPlan | None = None, kv_dtype: str = "auto", **options: Any
) -> AsyncIterator[World]:
    """`options`: the decode worker's."""
    channels, ears = Channels(TOKEN), Ears()
    with TransferEngine(cluster_token=TOKEN, faults=faults) as sender:
        async with decoding(path, kv_dtype=kv_dtype, **options) as (endpoint, service):
            client = PrefillClient(path, sender, channels, endpoint, kv_dtype)
            async with listening(ears, channels, endpoint):
                yield World(client, ears, service)
        await channels.close()
