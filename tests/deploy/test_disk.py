"""A cluster that is stopped and started again finds the KV of earlier prompts on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, running_cluster
from tests.random_models import make_model

NUM_BLOCKS = 5
BLOCK_SIZE = 32
PROMPT = [(11 * i * i + 5 * i) % 250 for i in range(NUM_BLOCKS * BLOCK_SIZE + 3)]


def until_stored(cluster: Cluster) -> None:
    def num_stored() -> int:
        store = cluster.instance("store-0")
        found: int = store["indexed_blocks"]
        return found

    cluster.wait_for("all blocks are in the store", lambda: num_stored() == NUM_BLOCKS)


def tokens_and_cached(answer: dict[str, Any]) -> tuple[str, int]:
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow  # starts a whole cluster, twice
@pytest.mark.e2e
def test_the_prefixes_of_a_stopped_cluster_are_there_after_its_next_start(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "model")
    flags: tuple[str, ...] = ("--dtype", "float32", "--dram", "64MiB", "--kv-cache-memory", "32MiB")
    flags += (
        "--ssd",
        f"{tmp_path / 'disk'}:256MiB",
        "--num-threads",
        "1",
        "--store-reads",
        "always",
    )
    with running_cluster(tmp_path / "model", tmp_path / "first", *flags) as cluster:
        text, cached = tokens_and_cached(cluster.complete(PROMPT, temperature=0, max_tokens=8))
        assert cached == 0
        until_stored(cluster)
    with running_cluster(tmp_path / "model", tmp_path / "second", *flags) as cluster:
        until_stored(cluster)
        again = cluster.complete(PROMPT, temperature=0, max_tokens=8)
        assert tokens_and_cached(again) == (text, NUM_BLOCKS * BLOCK_SIZE)
        assert cluster.counters("prefill-0")["store_hit_blocks"] == NUM_BLOCKS
        assert not cluster.tracebacks()
