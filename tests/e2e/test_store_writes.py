"""With `--store-writes hot` the store gets what was re-used, and nothing else changes for clients."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.accounts import accounts_of
from tests.e2e.cluster import Cluster, running_cluster
from tests.random_models import make_model

pytestmark = pytest.mark.e2e

BLOCK_SIZE = 16
NUM_BLOCKS = 5
FLAGS = ("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--kv-cache-memory", "8MiB")
HOT = ("--store-writes", "hot", "--prefix-eviction", "lfu")


def ask(cluster: Cluster, prompt: list[int]) -> tuple[list[int], int]:
    """Generated tokens, and how many of the prompt were cached."""
    answer = cluster.complete(
        prompt, max_tokens=4, temperature=0, ignore_eos=True, return_token_ids=True
    )
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["token_ids"], cached


def test_of_two_prompts_the_store_gets_the_one_that_was_asked_for_twice(tmp_path: Path) -> None:
    """Puts go in the order of the prompts, so the other one's would be there by then."""
    make_model("llama", tmp_path / "model")
    draw = random.Random(0)
    once, twice = (draw.choices(range(256), k=NUM_BLOCKS * BLOCK_SIZE + 7) for _ in range(2))
    with (
        running_cluster(tmp_path / "model", tmp_path, *FLAGS, *HOT) as cluster,
        accounts_of(cluster) as accounts,
    ):
        ask(cluster, once)
        first, _ = ask(cluster, twice)
        again, cached = ask(cluster, twice)
        assert again == first
        assert cached == NUM_BLOCKS * BLOCK_SIZE
        cluster.wait_for(
            "the puts", lambda: accounts.counter("prefill-0", "put_blocks") >= NUM_BLOCKS
        )
        assert accounts.counter("prefill-0", "put_blocks") == NUM_BLOCKS
        assert accounts.store().num_objects == NUM_BLOCKS
        accounts.wait_until_all_is_free()
