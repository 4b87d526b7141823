"""With `--store-writes hot` the store gets what was re-used, and nothing else changes for clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cluster import cached_of, prompt_of, small_cluster, tokens_of

pytestmark = pytest.mark.e2e

BLOCK_SIZE = 16
NUM_BLOCKS = 5
FLAGS = ("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--kv-cache-memory", "8MiB")
HOT = ("--store-writes", "hot", "--prefix-eviction", "lfu")


def test_of_two_prompts_the_store_gets_the_one_that_was_asked_for_twice(tmp_path: Path) -> None:
    """Puts go in the order of the prompts, so the other one's would be there by then."""
    once, twice = (prompt_of(name, NUM_BLOCKS * BLOCK_SIZE + 7) for name in ("once", "twice"))
    with small_cluster(tmp_path, *FLAGS, *HOT) as cluster:
        cluster.greedy(once, 4)
        first, again = (cluster.greedy(twice, 4) for _ in range(2))
        assert tokens_of(again) == tokens_of(first)
        assert cached_of(again) == NUM_BLOCKS * BLOCK_SIZE
        cluster.wait_for(
            "the puts", lambda: cluster.counter("prefill-0", "put_blocks") >= NUM_BLOCKS
        )
        assert cluster.counter("prefill-0", "put_blocks") == NUM_BLOCKS
        assert cluster.store().num_objects == NUM_BLOCKS
        cluster.wait_until_all_is_free()
