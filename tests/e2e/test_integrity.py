"""A byte that flips on the way or at rest is found, counted and computed again; the client notices nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, cached_of, prompt_of, small_cluster, tokens_of

pytestmark = pytest.mark.e2e

BLOCK_SIZE = 16
FLAGS = (
    *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--kv-cache-memory", "8MiB"),
    *("--store-reads", "always"),
)
PROMPT = prompt_of("integrity", 5 * BLOCK_SIZE + 7)
WORKERS = ("prefill-0", "decode-0")
NUM_BLOCKS = len(PROMPT) // BLOCK_SIZE
BAD_PUTS = {"shm": 1, "tcp": 0}
"""Over tcp, puts go in one round trip beside the transfer engine, whose faults these are."""


@pytest.fixture(scope="module", params=[("shm", "never"), ("tcp", "always")], ids="-".join)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, int]]:
    """With how many of its first puts arrive corrupt; the first handoff behind these does, too."""
    transport, layered_loads = request.param
    num_bad = BAD_PUTS[transport]
    flags = ("--transports", transport, "--layered-loads", layered_loads)
    faults = ("--fault-corrupt-writes", str(1 + num_bad))
    with small_cluster(tmp_path_factory.mktemp("integrity"), *FLAGS, *flags, *faults) as started:
        yield started, num_bad


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


def test_a_byte_flipped_on_the_way_is_computed_and_sent_again(cluster: tuple[Cluster, int]) -> None:
    on, num_bad_puts = cluster
    # A request that ends at the prefill worker: all that is written are its blocks, to the store.
    first = ask(on, max_tokens=1)
    on.wait_for("the puts", lambda: on.store().num_objects == NUM_BLOCKS - num_bad_puts)
    bad_puts = (num_bad_puts, 0, num_bad_puts)
    on.wait_for("a bad put", lambda: integrity_failures(on) == bad_puts)
    # Another prompt's handoff, whose layers are so small that they leave as one write.
    corrupted = ask_afresh(on, "corrupted")
    bad_blocks = (num_bad_puts + 1, 1, num_bad_puts)
    assert integrity_failures(on) == bad_blocks
    recomputed = on.counter("prefill-0", "recomputed_blocks")
    assert recomputed > 0
    # From here on all arrives. The source of a bad put was suspect: it is computed and put again.
    again = ask(on)
    if num_bad_puts:
        assert cached_of(again) < NUM_BLOCKS * BLOCK_SIZE
    on.wait_until_stored([PROMPT], BLOCK_SIZE)
    assert corrupted == tokens_of(again) == ask_afresh(on, "clean")
    assert tokens_of(first) == tokens_of(again)[:1]
    assert integrity_failures(on) == bad_blocks
    assert on.counter("prefill-0", "recomputed_blocks") == recomputed
    assert on.counter("prefill-0", "handed_off_requests") == 3
    on.wait_until_all_is_free()


def test_a_byte_flipped_in_the_store_is_found_when_it_is_read(cluster: tuple[Cluster, int]) -> None:
    on, num_bad_puts = cluster
    bad = 2
    before = ask(on)
    on.wait_until_stored([PROMPT], BLOCK_SIZE)
    on.flip_byte(PROMPT, bad, BLOCK_SIZE)
    failures = restarted(on, num_bad_puts, salt="first")
    after = ask(on)
    assert tokens_of(after) == tokens_of(before)
    assert cached_of(after) == bad * BLOCK_SIZE
    assert on.counter("store-0", "integrity_failures") == failures + 1
    assert on.counter("prefill-0", "store_hit_blocks") == bad
    on.wait_until_stored([PROMPT], BLOCK_SIZE)  # the recomputed block in the corrupt one's place
    failures = restarted(on, num_bad_puts, salt="second")
    healed = ask(on)
    assert tokens_of(healed) == tokens_of(before)
    assert cached_of(healed) == NUM_BLOCKS * BLOCK_SIZE
    assert on.counter("store-0", "integrity_failures") == failures
    on.wait_until_all_is_free()


def restarted(on: Cluster, num_bad_puts: int, salt: str) -> int:
    """Bad blocks that the store has counted once workers with nothing cached have made their bad writes, too, of a
    prompt that nobody looks at."""
    on.restart(*WORKERS)
    ask_afresh(on, salt)
    on.wait_for(
        "their faults", lambda: on.counter("prefill-0", "integrity_failures") == 1 + num_bad_puts
    )
    return on.counter("store-0", "integrity_failures")
