"""Workers whose engines have memory of their own, as on a GPU: nothing is computed from what was not loaded and nothing
is sent that was not stored; and decode steps that are begun before the ones before them have ended. The same processes
and handoffs; only the device is a stand-in."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.test_quantised_kv import coupled, stored_blocks, take
from tests.random_models import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCK_SIZE = 16
FLAGS = (
    *("--device", "cpu-staged", "--dtype", "float32", "--num-threads", "1"),
    *("--block-size", str(BLOCK_SIZE), "--max-num-batched-tokens", "100"),
    *("--store-reads", "always", "--layered-loads", "always", "--async-scheduling"),
)
LENGTHS = (1, 5, 16, 17, 100, 513)


def reusable(prompts: list[list[int]]) -> list[int]:
    return [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts]


def until_stored(cluster: Cluster, prompts: list[list[int]]) -> None:
    num_blocks = sum(len(prompt) // BLOCK_SIZE for prompt in prompts)
    cluster.wait_for("the write-behind", lambda: stored_blocks(cluster) >= num_blocks)


def kill(cluster: Cluster, name: str) -> None:
    """Returns when its successor, which has nothing in its memory, is a member."""
    epoch = cluster.epoch(name)
    os.kill(cluster.pids()[name], signal.SIGKILL)
    cluster.wait_for("its successor", lambda: cluster.epoch(name) > epoch)


def test_answers_are_those_of_one_engine(tmp_path: Path) -> None:
    """Prompts that were computed, that both workers have, and that the store has."""
    model = tmp_path / "model"
    make_model("llama", model, seed=1, max_position_embeddings=1_024)
    dice = random.Random(0)
    prompts = [dice.choices(range(250), k=length) for length in LENGTHS]
    expected = coupled(model, "auto", BLOCK_SIZE, prompts)
    with running_cluster(model, tmp_path / "logs", *FLAGS) as cluster:
        assert take(cluster, prompts) == (expected, [0] * len(prompts))
        until_stored(cluster, prompts)
        assert take(cluster, prompts) == (expected, reusable(prompts))
        kill(cluster, "prefill-0")
        assert take(cluster, prompts) == (expected, reusable(prompts))
        loaded = cluster.counters("prefill-0")["store_hit_blocks"]
        assert loaded * BLOCK_SIZE >= sum(reusable(prompts))
        kill(cluster, "decode-0")  # what the prefill worker has cached is sent again
        assert take(cluster, prompts) == (expected, reusable(prompts))
        assert cluster.tracebacks() == []
