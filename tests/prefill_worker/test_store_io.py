"""Prefixes are read layer by layer while the engine computes behind them, with a real store, which may fail during the
read, and a tiny model."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest

from moonserve.prefill_worker.store_io import BoundedWait, LayerGate, PrefixTimeout
from moonserve.protocol.request import Endpoint, PrefixSource
from moonserve.protocol.step_time import PrefillProfile
from tests.kvstore.node.nodes import Node, remove
from tests.patience import PATIENCE_S, answered
from tests.prefill_worker.cluster import NUM_STORED, PROMPT, Cluster, cluster, put_into, source_of, stored_prompt
from tests.processes import running
from tests.worker.parts import BLOCK_SIZE, TOKEN

NUM_LAYERS = 4
MODEL = {"num_hidden_layers": NUM_LAYERS}
# So slow that an early step may always begin, whatever the speed of the machine.
PROFILE = PrefillProfile(c0=1000.0, c1=1000.0, c2=0.0)


@asynccontextmanager
async def mortal_store(own_model: Path, transports: str, name: str = "store-0") -> AsyncIterator[tuple[Endpoint, Node]]:
    """Starts a store node with the blocks of PROMPT, in a process that a test can kill."""
    flags = ("--instance-id", name, "--dram", "4MiB", "--transports", transports)
    with running("store", *flags, token=TOKEN) as (process, facts):
        async with cluster(own_model, home_store=name) as writer:
            store = await writer.stores.locate(facts["rpc"])
            await put_into(writer, store, [PROMPT])
            yield store, Node(process, facts["rpc"])


reading = partial(cluster, profile=PROFILE, layered_loads="always")
"""Starts a worker that reads every prefix layer by layer."""


async def held_in_an_early_step(c: Cluster, *sources: PrefixSource) -> None:
    """Submits PROMPT and returns when its first layer has arrived and its step waits for the second."""
    c.stores.turns.close()
    await c.submit("r", PROMPT, sources=sources, max_tokens=5)
    await answered(c.status, lambda status: status.counters.get("early_steps"))
    await asyncio.wait_for(c.stores.turns.reached.wait(), PATIENCE_S)


async def finished_right(c: Cluster, names: Sequence[str] = ("r",)) -> dict[str, int]:
    """Lets reads go on and checks that all tokens are those of the coupled engine and no block is held. Returns the
    worker's counters."""
    c.stores.turns.open()
    for name in names:
        assert await c.ears.all_tokens(name) == c.expected(PROMPT, 5)
    await c.assert_drained()
    return dict((await c.status()).counters)


@pytest.mark.parametrize("device", ["cpu", "cpu-staged"])
async def test_tokens_are_the_same_and_only_the_rest_is_computed(own_model: Path, device: str) -> None:
    """Holds also if blocks are copied to a device and from it. Loaded blocks serve later prompts."""
    async with stored_prompt(own_model) as store, reading(own_model, device=device) as c:
        await held_in_an_early_step(c, source_of(store))
        assert c.engine.num_tokens == 3
        assert "r" not in c.ears.tokens, "nothing counts yet"
        counters = await finished_right(c)
        assert c.stores.num_turns == NUM_LAYERS
        assert c.engine.num_tokens == 3
        assert counters["store_hit_blocks"] == NUM_STORED
        assert c.ears.reports["r"].cached_tokens == NUM_STORED * BLOCK_SIZE
        await c.submit("again", PROMPT, sources=[source_of(store)], max_tokens=5)
        assert (await finished_right(c, ("r", "again")))["device_hit_blocks"] == NUM_STORED


@pytest.mark.parametrize("turn", [0, NUM_LAYERS - 1])
async def test_a_corrupt_block_is_found_and_what_was_computed_behind_it_is_dropped(own_model: Path, turn: int) -> None:
    """One layer of the last block is corrupted during the read; the store's own copy stays good."""
    async with stored_prompt(own_model) as store, reading(own_model) as c:
        c.stores.damaged_turns.add(turn)
        await held_in_an_early_step(c, source_of(store))
        counters = await finished_right(c)
        assert counters["spoilt_early_steps"] == 1
        assert counters["store_hit_blocks"] == NUM_STORED - 1
        assert c.engine.num_tokens == 3 + BLOCK_SIZE + 3


@pytest.mark.parametrize("transports", ["shm,tcp", "tcp"])
async def test_a_store_that_is_killed_in_the_middle_costs_time_and_no_token(own_model: Path, transports: str) -> None:
    """With shm, the dead store's memory stays mapped and its verified contents are right. A later prompt is computed,
    since the store is gone."""
    async with mortal_store(own_model, transports) as (store, node), reading(own_model) as c:
        await held_in_an_early_step(c, source_of(store))
        node.kill()
        counters = await finished_right(c)
        if transports == "tcp":
            assert counters["given_up_early_steps"] == 1
            assert counters["prefix_load_failures"] == 1
        other = [7, *PROMPT]
        await c.submit("other", other, sources=[source_of(store)], max_tokens=5)
        assert await c.ears.all_tokens("other") == c.expected(other, 5)


async def test_blocks_of_another_store_are_kept_when_one_is_killed(own_model: Path) -> None:
    """The first two blocks come from a live store, the others from one that is killed after its first turn."""
    async with (
        stored_prompt(own_model) as good,
        mortal_store(own_model, "tcp", "store-1") as (bad, node),
        reading(own_model) as c,
    ):
        c.stores.num_ungated_turns = 2
        await held_in_an_early_step(c, source_of(good, 2), source_of(bad, NUM_STORED - 2, 2))
        node.kill()
        counters = await finished_right(c)
        assert counters["given_up_early_steps"] == 1
        assert counters["store_hit_blocks"] == 2


async def test_stalled_store_delays_no_other_request(own_model: Path) -> None:
    """The step is given up, other prompts run, and the prompt continues once its prefix has arrived."""
    async with stored_prompt(own_model) as store, reading(own_model, spare_wait_s=0.0) as c:
        await held_in_an_early_step(c, source_of(store))
        other = [(7 * i) % 250 for i in range(13)]
        await c.submit("other", other, max_tokens=5)
        assert await c.ears.all_tokens("other") == c.expected(other, 5)
        assert "r" not in c.ears.tokens
        counters = await finished_right(c)
        assert counters["given_up_early_steps"] == 1
        assert counters["store_hit_blocks"] == NUM_STORED


async def test_a_cancelled_request_and_a_worker_that_stops_leave_nothing_behind(own_model: Path) -> None:
    async with stored_prompt(own_model) as store:
        async with reading(own_model) as c:
            await held_in_an_early_step(c, source_of(store))
            await c.cancel("r")
            c.stores.turns.open()
            await c.assert_drained()
            assert "r" not in c.ears.tokens
        async with reading(own_model) as c:
            await held_in_an_early_step(c, source_of(store))


async def test_a_store_that_has_lost_blocks_gives_the_others(own_model: Path) -> None:
    async with stored_prompt(own_model) as store, reading(own_model) as c:
        keys = c.request("r", PROMPT).block_keys
        await remove(c.stores, store, keys[3:4])
        await held_in_an_early_step(c, source_of(store))
        counters = await finished_right(c)
        assert counters["store_hit_blocks"] == 3
        assert c.engine.num_tokens == 2 * BLOCK_SIZE + 3


def test_timeout_covers_all_layers_and_loaded_layers_need_no_wait() -> None:
    gate = LayerGate()
    wait = BoundedWait(gate, limit_s=0.001)
    with pytest.raises(PrefixTimeout):
        wait.before(0)
    assert (waited_s := wait.waited_s) > 0.0
    gate.announce(1)
    wait.before(0)
    assert wait.waited_s == waited_s
    with pytest.raises(PrefixTimeout):
        wait.before(1)


@pytest.mark.parametrize("closes", [False, True])
def test_waiting_step_continues_when_the_layer_arrives_and_fails_when_the_gate_closes(closes: bool) -> None:
    """The engine's thread waits for the second layer. After the close, the first one still needs no wait."""
    gate = LayerGate()
    with ThreadPoolExecutor(1) as engine:
        waited = engine.submit(BoundedWait(gate, 2 * PATIENCE_S).before, 1)
        gate.announce(1)
        gate.close() if closes else gate.announce(2)
        with pytest.raises(PrefixTimeout) if closes else nullcontext():
            waited.result(PATIENCE_S)
    BoundedWait(gate, 0.0).before(0)
