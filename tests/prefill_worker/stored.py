"""Stores that have a prompt's blocks, put there by a prefill worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from kvstore.config import StoreConfig
from kvstore.node import serve as serve_store
from protocol.request import Endpoint, PrefixSource
from tests.prefill_worker.cluster import BLOCK_SIZE, TOKEN, Cluster, cluster
from tests.services import serving

NUM_STORED = 5
PROMPT = [(11 * i * i + 5 * i) % 250 for i in range(NUM_STORED * BLOCK_SIZE + 3)]


def source_of(store: Endpoint, num_blocks: int = NUM_STORED, first: int = 0) -> PrefixSource:
    return PrefixSource(store=store, first_block=first, num_blocks=num_blocks)


@asynccontextmanager
async def store_node(c: Cluster, disk: str | None = None) -> AsyncIterator[Endpoint]:
    """The product's store node, in the test's own process."""
    config = StoreConfig(instance_id="store-0", cluster_token=TOKEN, dram=4 * 2**20, ssd=disk)
    async with serving(serve_store, config) as facts:
        yield await c.stores.locate(facts["rpc"])


async def put_into(c: Cluster, store: Endpoint, prompts: Sequence[Sequence[int]]) -> None:
    """Has the worker compute these prompts; their blocks follow to its home store."""
    c.service.home_found(store)
    for number, prompt in enumerate(prompts):
        await c.submit(f"w{number}", prompt, max_tokens=1)
        await c.ears.all_tokens(f"w{number}")
        await c.until_stored(store, c.request(f"w{number}", prompt).block_keys)


@asynccontextmanager
async def stored_prompt(path: Path) -> AsyncIterator[Endpoint]:
    """A store node that has PROMPT."""
    async with cluster(path, home_store="store-0") as writer, store_node(writer) as store:
        await put_into(writer, store, [PROMPT])
        yield store
