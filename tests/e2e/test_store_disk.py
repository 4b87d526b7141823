"""Test that a restarted store node has the KV of earlier prompts on its disk, and that workers with empty caches find
it there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, running_cluster
from tests.random_models import make_model

NUM_BLOCKS = 5
BLOCK_SIZE = 32
PROMPT = [(11 * i * i + 5 * i) % 250 for i in range(NUM_BLOCKS * BLOCK_SIZE + 3)]
FLAGS = ("--dtype", "float32", "--dram", "64MiB", "--kv-cache-memory", "32MiB")
FLAGS += ("--num-threads", "1", "--store-reads", "always")


def until_stored(cluster: Cluster) -> None:
    cluster.wait_for("all is in the store", lambda: cluster.instance("store-0")["indexed_blocks"] == NUM_BLOCKS)


def tokens_and_cached(cluster: Cluster) -> tuple[str, int]:
    answer: dict[str, Any] = cluster.complete(PROMPT, temperature=0, max_tokens=8)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.e2e
def test_prefixes_on_disk_survive_a_restart_of_store_and_worker(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "model")
    disk = ("--ssd", f"{tmp_path / 'disk'}:256MiB")
    with running_cluster(tmp_path / "model", tmp_path / "logs", *FLAGS, *disk) as cluster:
        text, cached = tokens_and_cached(cluster)
        assert cached == 0
        until_stored(cluster)
        epoch = cluster.epoch("store-0")
        os.kill(cluster.pids()["store-0"], signal.SIGTERM)  # it first writes blocks that are only in memory
        cluster.wait_for("the store's successor", lambda: cluster.epoch("store-0") > epoch)
        until_stored(cluster)
        cluster.restart("prefill-0")
        assert tokens_and_cached(cluster) == (text, NUM_BLOCKS * BLOCK_SIZE)
        assert cluster.counters("prefill-0")["store_hit_blocks"] == NUM_BLOCKS
        assert not cluster.tracebacks()
