"""Prefixes that are read layer by layer while the engine computes behind them: a real store process, which may fail in
the middle, and a real (tiny) model."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from protocol.profile import PrefillProfile
from protocol.request import Endpoint, PrefixSource
from tests.patience import PATIENCE_S, answered
from tests.prefill_worker.cluster import BLOCK_SIZE, Cluster, cluster
from tests.prefill_worker.processes import process_of
from tests.random_models import make_model

NUM_LAYERS = 4
NUM_STORED = 5
PROMPT = [(11 * i * i + 5 * i) % 250 for i in range(NUM_STORED * BLOCK_SIZE + 3)]
# So slow that a step may always begin: how fast the machine is decides nothing.
PROFILE = PrefillProfile(c0=1000.0, c1=1000.0, c2=0.0)
TRANSPORTS = ("shm,tcp", "tcp")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("llama", path, num_hidden_layers=NUM_LAYERS)
    return path


@dataclass
class Store:
    """A store node that has the prompt's blocks."""

    endpoint: Endpoint
    process: asyncio.subprocess.Process

    @property
    def source(self) -> PrefixSource:
        return PrefixSource(store=self.endpoint, first_block=0, num_blocks=NUM_STORED)


@asynccontextmanager
async def stored_prompt(
    model_path: Path, transports: str = TRANSPORTS[0], name: str = "store-0"
) -> AsyncIterator[Store]:
    flags = ("--instance-id", name, "--dram", "4MiB", "--transports", transports)
    async with (
        cluster(model_path, home_store=name) as writer,
        process_of("kvstore", *flags) as (process, rpc),
    ):
        store = await writer.stores.locate(rpc)
        writer.service.home_found(store)
        await writer.submit("w", PROMPT, max_tokens=1)
        await writer.ears.all_tokens("w")
        keys = writer.request("w", PROMPT).block_keys
        await writer.until_stored(store, keys)
        yield Store(store, process)


@asynccontextmanager
async def reading(
    model_path: Path, *, spare_wait_s: float = PATIENCE_S, device: str = "cpu"
) -> AsyncIterator[Cluster]:
    """A worker that reads every prefix layer by layer."""
    async with cluster(
        model_path,
        profile=PROFILE,
        layered_loads="always",
        spare_wait_s=spare_wait_s,
        device=device,
    ) as reader:
        yield reader


async def until_counted(c: Cluster, name: str) -> None:

    async def count() -> int | None:
        return (await c.status()).counters.get(name)

    await answered(count)


async def held_in_an_early_step(c: Cluster, store: Store) -> None:
    """The prompt's first layer is there, its step is under way and waits for the second."""
    c.stores.turns.close()
    await c.submit("r", PROMPT, sources=[store.source], max_tokens=5)
    await until_counted(c, "early_steps")
    await asyncio.wait_for(c.stores.turns.reached.wait(), PATIENCE_S)


async def assert_right(c: Cluster, names: Sequence[str] = ("r",)) -> dict[str, int]:
    """All tokens are those of the coupled engine, and nothing is held any more. Gives the counters."""
    for name in names:
        assert await c.ears.all_tokens(name) == c.expected(PROMPT, 5)
    await c.assert_drained()
    return dict((await c.status()).counters)


@pytest.mark.parametrize(
    ("transports", "device"), [(TRANSPORTS[0], "cpu"), (TRANSPORTS[1], "cpu-staged")]
)
async def test_tokens_are_the_same_and_only_the_rest_is_computed(
    model_path: Path, transports: str, device: str
) -> None:
    """Also where what arrives has to be loaded to a device, and what is computed to be stored."""
    async with (
        stored_prompt(model_path, transports) as store,
        reading(model_path, device=device) as c,
    ):
        await held_in_an_early_step(c, store)
        assert c.engine.num_tokens == 3
        assert "r" not in c.ears.tokens, "nothing counts yet"
        c.stores.turns.open()
        counters = await assert_right(c)
        assert c.stores.num_turns == NUM_LAYERS
        assert c.engine.num_tokens == 3
        assert counters["store_hit_blocks"] == NUM_STORED
        assert c.ears.reports["r"].cached_tokens == NUM_STORED * BLOCK_SIZE


@pytest.mark.parametrize("device", ["cpu", "cpu-staged"])
async def test_what_was_loaded_serves_later_prompts(model_path: Path, device: str) -> None:
    async with stored_prompt(model_path) as store, reading(model_path, device=device) as c:
        await c.submit("r", PROMPT, sources=[store.source], max_tokens=5)
        await c.ears.all_tokens("r")
        await c.submit("again", PROMPT, sources=[store.source], max_tokens=5)
        counters = await assert_right(c, ("r", "again"))
        assert counters["device_hit_blocks"] == NUM_STORED


@pytest.mark.parametrize("turn", [0, NUM_LAYERS - 1])
async def test_a_corrupt_block_is_found_and_what_was_computed_behind_it_is_dropped(
    model_path: Path, turn: int
) -> None:
    """In one layer of the last block. The store's own copy is good, but the reader cannot know."""
    async with stored_prompt(model_path) as store, reading(model_path) as c:
        c.stores.damaged_turns.add(turn)
        await held_in_an_early_step(c, store)
        c.stores.turns.open()
        counters = await assert_right(c)
        assert counters["spoilt_early_steps"] == 1
        assert counters["store_hit_blocks"] == NUM_STORED - 1
        assert c.engine.num_tokens == 3 + BLOCK_SIZE + 3


@pytest.mark.parametrize("transports", TRANSPORTS)
async def test_a_store_that_is_killed_in_the_middle_costs_time_and_no_token(
    model_path: Path, transports: str
) -> None:
    """Over shm its memory stays mapped, and what had been verified by its writer is still right."""
    async with stored_prompt(model_path, transports) as store, reading(model_path) as c:
        await held_in_an_early_step(c, store)
        store.process.kill()
        await store.process.wait()
        c.stores.turns.open()
        counters = await assert_right(c)
        if transports == "tcp":
            assert counters["given_up_early_steps"] == 1
            assert counters["prefix_load_failures"] == 1


async def test_what_another_store_gave_is_kept_when_one_is_killed(model_path: Path) -> None:
    """The first two blocks come from a store that lives, the others from one that dies after its first turn."""
    async with (
        stored_prompt(model_path) as good,
        stored_prompt(model_path, "tcp", "store-1") as bad,
        reading(model_path) as c,
    ):
        c.stores.num_ungated_turns = 2
        sources = [
            PrefixSource(store=good.endpoint, first_block=0, num_blocks=2),
            PrefixSource(store=bad.endpoint, first_block=2, num_blocks=NUM_STORED - 2),
        ]
        c.stores.turns.close()
        await c.submit("r", PROMPT, sources=sources, max_tokens=5)
        await until_counted(c, "early_steps")
        bad.process.kill()
        await bad.process.wait()
        c.stores.turns.open()
        counters = await assert_right(c)
        assert counters["given_up_early_steps"] == 1
        assert counters["store_hit_blocks"] == 2


async def test_a_store_that_stands_still_holds_nobody_else_up(model_path: Path) -> None:
    """The step is given up, others run, and the prompt goes on once its prefix is there."""
    async with (
        stored_prompt(model_path) as store,
        reading(model_path, spare_wait_s=0.0) as c,
    ):
        await held_in_an_early_step(c, store)
        other = [(7 * i) % 250 for i in range(13)]
        await c.submit("other", other, max_tokens=5)
        assert await c.ears.all_tokens("other") == c.expected(other, 5)
        assert "r" not in c.ears.tokens
        c.stores.turns.open()
        counters = await assert_right(c)
        assert counters["given_up_early_steps"] == 1
        assert counters["store_hit_blocks"] == NUM_STORED


async def test_a_cancelled_request_leaves_nothing_behind(model_path: Path) -> None:
    async with stored_prompt(model_path) as store, reading(model_path) as c:
        await held_in_an_early_step(c, store)
        await c.cancel("r")
        c.stores.turns.open()
        await c.assert_drained()
        assert "r" not in c.ears.tokens


async def test_a_worker_that_stops_in_the_middle_ends(model_path: Path) -> None:
    async with stored_prompt(model_path) as store, reading(model_path) as c:
        await held_in_an_early_step(c, store)


async def test_a_store_that_has_lost_blocks_gives_the_others(model_path: Path) -> None:
    async with stored_prompt(model_path) as store, reading(model_path) as c:
        keys = c.request("r", PROMPT).block_keys
        await c.stores.remove(store.endpoint, keys[3:4])
        await held_in_an_early_step(c, store)
        c.stores.turns.open()
        counters = await assert_right(c)
        assert counters["store_hit_blocks"] == 3
        assert c.engine.num_tokens == 2 * BLOCK_SIZE + 3


async def test_a_store_that_is_gone_means_computing(model_path: Path) -> None:
    async with stored_prompt(model_path) as store, reading(model_path) as c:
        store.process.send_signal(signal.SIGTERM)
        await store.process.wait()
        await c.submit("r", PROMPT, sources=[store.source], max_tokens=5)
        counters = await assert_right(c)
        assert counters["prefix_load_failures"] == 1
