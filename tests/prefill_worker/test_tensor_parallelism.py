"""Prefill and decode workers of different tensor-parallel sizes: handoff, prefix caches and stores as with one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.steps import random_prompt
from tests.prefill_worker.cluster import BLOCK_SIZE, cluster, put_into, source_of, store_node
from tests.random_models import make_model

MAX_TOKENS = 8
SHARED = random_prompt(5 * BLOCK_SIZE, seed=1)
PROMPTS = {
    "first": SHARED + random_prompt(7, seed=2),
    "its-prefix-is-cached": SHARED + random_prompt(30, seed=3),
    "short": random_prompt(3, seed=4),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four KV heads, for four ranks."""
    path = tmp_path_factory.mktemp("model")
    make_model("llama", path, num_key_value_heads=4)
    return path


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (4, 2)])
async def test_any_sizes_give_the_tokens_of_one_engine(prefill_ranks: int, decode_ranks: int, model_path: Path) -> None:
    """What one computed, the other takes over in the middle: the same layout, the same fingerprint, verified blocks."""
    sizes = {"prefill_ranks": prefill_ranks, "decode_ranks": decode_ranks}
    async with cluster(model_path, **sizes) as c:  # type: ignore[arg-type]
        for name, prompt in PROMPTS.items():
            await c.submit(name, prompt, max_tokens=MAX_TOKENS)
            assert await c.ears.all_tokens(name) == c.expected(prompt, MAX_TOKENS)
        assert c.engine.num_tokens == sum(map(len, PROMPTS.values())) - len(SHARED)
        await c.assert_drained()


@pytest.mark.parametrize(("writing", "reading"), [(2, 1), (1, 2), (4, 2)])
async def test_a_store_does_not_know_how_many_ranks_made_a_block(writing: int, reading: int, model_path: Path) -> None:
    """Put by a worker of one size, read and computed on by one of another."""
    async with (
        cluster(model_path, home_store="store-0", prefill_ranks=writing) as writer,
        store_node(writer) as store,
        cluster(model_path, layered_loads="never", prefill_ranks=reading) as reader,
    ):
        await put_into(writer, store, [PROMPTS["first"]])
        prompt = PROMPTS["its-prefix-is-cached"]
        await reader.submit("r", prompt, sources=[source_of(store, 5)], max_tokens=MAX_TOKENS)
        assert await reader.ears.all_tokens("r") == reader.expected(prompt, MAX_TOKENS)
        assert (await reader.status()).counters["store_hit_blocks"] == 5
        await reader.assert_drained()
