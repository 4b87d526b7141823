"""Prefixes that lie in a store, near or far: a real store process with a real disk, a real (tiny) model."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.store_speed import FORGET_AFTER_S
from protocol.profile import PrefillProfile
from protocol.request import Endpoint, PrefixSource
from tests.patience import PATIENCE_S, answered
from tests.prefill_worker.cluster import BLOCK_SIZE, Cluster, cluster
from tests.prefill_worker.processes import process_of
from tests.random_models import make_model

PROMPT = [(11 * i * i + 5 * i) % 250 for i in range(5 * BLOCK_SIZE + 3)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("llama", path)
    return path


@asynccontextmanager
async def store_process(c: Cluster, *flags: str) -> AsyncIterator[Endpoint]:
    """A store node that stops in order when the block ends."""
    name = ("--instance-id", "store-0", "--dram", "4MiB")
    async with process_of("kvstore", *name, *flags) as (process, rpc):
        yield await c.stores.locate(rpc)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0


async def put_into(c: Cluster, store: Endpoint, prompts: Sequence[Sequence[int]]) -> None:
    """Has the worker compute these prompts; their blocks follow to its home store."""
    c.service.home_found(store)
    for number, prompt in enumerate(prompts):
        await c.submit(f"w{number}", prompt, max_tokens=1)
        await c.ears.all_tokens(f"w{number}")
        keys = c.request(f"w{number}", prompt).block_keys
        await c.until_stored(store, keys)


async def until_on_disk_only(c: Cluster, store: Endpoint, count: int) -> None:
    """Waits until the store has so many objects on disk and not in memory."""

    async def on_disk() -> bool:
        stats = await c.stores.stats(store)
        return stats.recovered == 1 and stats.num_on_disk == count

    await answered(on_disk)


@asynccontextmanager
async def store_with_prompt_on_disk(model_path: Path, folder: Path) -> AsyncIterator[Endpoint]:
    """A store node that was restarted after it had been given the prompt."""
    disk = ("--ssd", f"{folder}:64MiB")
    async with cluster(model_path, home_store="store-0") as writer:
        async with store_process(writer, *disk) as store:
            await put_into(writer, store, [PROMPT])
        async with store_process(writer, *disk) as store:
            await until_on_disk_only(writer, store, 5)
            yield store


async def test_a_prefix_that_is_only_on_disk_is_read(model_path: Path, tmp_path: Path) -> None:
    async with (
        store_with_prompt_on_disk(model_path, tmp_path) as store,
        cluster(model_path) as reader,
    ):
        source = PrefixSource(store=store, first_block=0, num_blocks=5)
        await reader.submit("r", PROMPT, sources=[source], max_tokens=5)
        assert await reader.ears.all_tokens("r") == reader.expected(PROMPT, 5)
        assert reader.engine.num_tokens == 3
        counters = (await reader.status()).counters
        assert counters["store_hit_blocks"] == 5
        assert counters["prefetched_blocks"] == 0
        await reader.assert_drained()


async def test_a_waiting_request_finds_its_prefix_in_memory(
    model_path: Path, tmp_path: Path
) -> None:
    """The prefix comes from the disk while the engine is held in an earlier request's step."""
    async with (
        store_with_prompt_on_disk(model_path, tmp_path) as store,
        cluster(model_path, num_blocks=8) as reader,
    ):
        reader.engine.gate.close()
        await reader.submit("earlier", list(range(4 * BLOCK_SIZE)), max_tokens=1)
        source = PrefixSource(store=store, first_block=0, num_blocks=5)
        await reader.submit("r", PROMPT, sources=[source], max_tokens=5)
        await until_on_disk_only(reader, store, 0)
        assert (await reader.status()).counters["prefetched_blocks"] == 5

        reader.engine.gate.open()
        assert await reader.ears.all_tokens("r") == reader.expected(PROMPT, 5)
        assert (await reader.status()).counters["store_hit_blocks"] == 5
        await reader.assert_drained()


async def test_a_slow_store_is_computed_around_until_it_is_tried_again(model_path: Path) -> None:
    prompts = [[(n * 37 + 11 * i * i) % 250 for i in range(20)] for n in range(7)]
    # 20 ms to compute a prompt, 300 ms to read it.
    profile = PrefillProfile(c0=0.0, c1=0.001, c2=0.0)
    async with (
        cluster(model_path, home_store="store-0") as writer,
        store_process(writer) as store,
        cluster(model_path, profile=profile) as reader,
    ):
        await put_into(writer, store, prompts)
        source = PrefixSource(store=store, first_block=0, num_blocks=2)

        async def num_read(name: str, prompt: Sequence[int]) -> int:
            before = (await reader.status()).counters["store_hit_blocks"]
            await reader.submit(name, prompt, sources=[source], max_tokens=1)
            assert await reader.ears.all_tokens(name) == reader.expected(prompt, 1)
            return (await reader.status()).counters["store_hit_blocks"] - before

        reader.stores.delay_s = 0.3
        slow = [await num_read(f"slow{n}", prompts[n]) for n in range(5)]
        assert slow[0] == 2
        assert slow[-1] == 0
        reader.stores.delay_s = 0.0
        assert await num_read("avoided", prompts[5]) == 0
        reader.clock.ahead_s = FORGET_AFTER_S + 1
        assert await num_read("again", prompts[6]) == 2
        await reader.assert_drained()
