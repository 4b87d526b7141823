"""Clients' hints reach the store: what is not to be stored is not, and what has a low priority leaves first."""

from tests.e2e.cluster import UNHURRIED, Cluster, prompt_of

BLOCK_SIZE = 32
FLAGS = (*UNHURRIED, "--block-size", str(BLOCK_SIZE), "--dram", "1MiB")
NUM_BLOCKS, NUM_LOW = 4, 16  # of prompts; one round of evictions takes fewer blocks than NUM_LOW


def fill(cluster: Cluster, name: str, num_blocks: int = NUM_BLOCKS, **hints: object) -> list[int]:
    """Sends a prompt with hints and returns it."""
    prompt = prompt_of(name, num_blocks * BLOCK_SIZE)
    cluster.greedy(prompt, 2, kv_cache=hints)
    return prompt


def num_stored(cluster: Cluster, prompt: list[int]) -> int:
    return len(cluster.places(cluster.keys_of(prompt, BLOCK_SIZE)))


def test_hints_decide_what_is_stored_and_what_leaves_first(cluster: Cluster) -> None:
    unstored = prompt_of("unstored", NUM_BLOCKS * BLOCK_SIZE)
    cluster.greedy(unstored, BLOCK_SIZE + 1, kv_cache={"store": False})  # the answer fills a block
    normal = fill(cluster, "normal")
    low = fill(cluster, "low", NUM_LOW, eviction_priority="low")
    cluster.wait_until_stored([normal, low], BLOCK_SIZE)  # puts are in order, so an earlier one has ended too
    assert num_stored(cluster, unstored) == 0
    assert cluster.store().num_objects == NUM_BLOCKS + NUM_LOW
    number = 0
    while num_stored(cluster, low) == NUM_LOW:
        number += 1
        cluster.wait_until_stored([fill(cluster, f"other-{number}")], BLOCK_SIZE)
    assert num_stored(cluster, normal) == NUM_BLOCKS
    assert cluster.greedy(unstored, 2)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cluster.wait_until_all_is_free()
