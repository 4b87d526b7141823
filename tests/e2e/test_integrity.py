"""A byte that flips in transit or at rest is detected, counted and recomputed; the client notices nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.cluster import Cluster, cached_of, prompt_of, tokens_of

pytestmark = pytest.mark.e2e

BLOCK_SIZE = 16
FLAGS = (
    *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--kv-cache-memory", "8MiB"),
    *("--store-reads", "always", "--transports", "shm", "--layered-loads", "always"),
    # The first put and the first handoff after it arrive corrupt.
    *("--fault-corrupt-writes", "2"),
)
PROMPT = prompt_of("integrity", 5 * BLOCK_SIZE + 7)
WORKERS = ("prefill-0", "decode-0")
NUM_BLOCKS = len(PROMPT) // BLOCK_SIZE
NUM_BAD_PUTS = 1


def ask(cluster: Cluster, max_tokens: int = 12, **parameters: Any) -> dict[str, Any]:
    return cluster.greedy(PROMPT, max_tokens, **parameters)


def ask_afresh(cluster: Cluster, salt: str) -> list[int]:
    """Returns the tokens of an answer with all KV recomputed, because another salt gives other keys."""
    answer = ask(cluster, cache_salt=salt)
    assert cached_of(answer) == 0
    return tokens_of(answer)


def integrity_failures(cluster: Cluster) -> tuple[int, ...]:
    """Returns the numbers of bad blocks counted by prefill worker, decode worker and store."""
    names = ("prefill-0", "decode-0", "store-0")
    return tuple(cluster.counter(name, "integrity_failures") for name in names)


def test_a_byte_flipped_in_transfer_is_computed_and_sent_again(cluster: Cluster) -> None:
    # A request that ends at the prefill worker writes only its blocks, to the store.
    first = ask(cluster, max_tokens=1)
    cluster.wait_for("the puts", lambda: cluster.store().num_objects == NUM_BLOCKS - NUM_BAD_PUTS)
    bad_puts = (NUM_BAD_PUTS, 0, NUM_BAD_PUTS)
    cluster.wait_for("a bad put", lambda: integrity_failures(cluster) == bad_puts)
    # The handoff of another prompt. Its layers are so small that they leave as one write.
    corrupted = ask_afresh(cluster, "corrupted")
    bad_blocks = (NUM_BAD_PUTS + 1, 1, NUM_BAD_PUTS)
    assert integrity_failures(cluster) == bad_blocks
    recomputed = cluster.counter("prefill-0", "recomputed_blocks")
    assert recomputed > 0
    # No further corruption. The source of the bad put was suspect, so its block is recomputed and put again.
    again = ask(cluster)
    assert cached_of(again) < NUM_BLOCKS * BLOCK_SIZE
    cluster.wait_until_stored([PROMPT], BLOCK_SIZE)
    assert corrupted == tokens_of(again) == ask_afresh(cluster, "clean")
    assert tokens_of(first) == tokens_of(again)[:1]
    assert integrity_failures(cluster) == bad_blocks
    assert cluster.counter("prefill-0", "recomputed_blocks") == recomputed
    cluster.wait_until_all_is_free()
    assert cluster.counter("prefill-0", "handed_off_requests") == 3
