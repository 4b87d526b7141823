"""A byte that flips on the way or at rest is found, counted and computed again; the client notices nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.cluster import Cluster, cached_of, prompt_of, tokens_of

pytestmark = pytest.mark.e2e

BLOCK_SIZE = 16
FLAGS = (
    *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--kv-cache-memory", "8MiB"),
    *("--store-reads", "always", "--transports", "shm", "--layered-loads", "always"),
    # The first put arrives corrupt, and the first handoff behind it.
    *("--fault-corrupt-writes", "2"),
)
PROMPT = prompt_of("integrity", 5 * BLOCK_SIZE + 7)
WORKERS = ("prefill-0", "decode-0")
NUM_BLOCKS = len(PROMPT) // BLOCK_SIZE
NUM_BAD_PUTS = 1


def ask(cluster: Cluster, max_tokens: int = 12, **parameters: Any) -> dict[str, Any]:
    return cluster.greedy(PROMPT, max_tokens, **parameters)


def ask_afresh(cluster: Cluster, salt: str) -> list[int]:
    """Tokens of an answer with all KV computed anew: keys under another salt are other keys."""
    answer = ask(cluster, cache_salt=salt)
    assert cached_of(answer) == 0
    return tokens_of(answer)


def integrity_failures(cluster: Cluster) -> tuple[int, ...]:
    """Bad blocks that prefill worker, decode worker and store have counted."""
    names = ("prefill-0", "decode-0", "store-0")
    return tuple(cluster.counter(name, "integrity_failures") for name in names)


def test_a_byte_flipped_on_the_way_is_computed_and_sent_again(cluster: Cluster) -> None:
    # A request that ends at the prefill worker: all that is written are its blocks, to the store.
    first = ask(cluster, max_tokens=1)
    cluster.wait_for("the puts", lambda: cluster.store().num_objects == NUM_BLOCKS - NUM_BAD_PUTS)
    bad_puts = (NUM_BAD_PUTS, 0, NUM_BAD_PUTS)
    cluster.wait_for("a bad put", lambda: integrity_failures(cluster) == bad_puts)
    # Another prompt's handoff, whose layers are so small that they leave as one write.
    corrupted = ask_afresh(cluster, "corrupted")
    bad_blocks = (NUM_BAD_PUTS + 1, 1, NUM_BAD_PUTS)
    assert integrity_failures(cluster) == bad_blocks
    recomputed = cluster.counter("prefill-0", "recomputed_blocks")
    assert recomputed > 0
    # From here on all arrives. The source of a bad put was suspect: it is computed and put again.
    again = ask(cluster)
    assert cached_of(again) < NUM_BLOCKS * BLOCK_SIZE
    cluster.wait_until_stored([PROMPT], BLOCK_SIZE)
    assert corrupted == tokens_of(again) == ask_afresh(cluster, "clean")
    assert tokens_of(first) == tokens_of(again)[:1]
    assert integrity_failures(cluster) == bad_blocks
    assert cluster.counter("prefill-0", "recomputed_blocks") == recomputed
    cluster.wait_until_all_is_free()
    assert cluster.counter("prefill-0", "handed_off_requests") == 3
