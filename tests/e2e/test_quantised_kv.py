"""A cluster whose KV is quantised answers as one engine alone does: computed, from a worker's cache, from the store."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.config import load_model_config
from engine.engine import Engine
from engine.generate import generate
from models import demo_model_path
from protocol.request import SamplingParams
from tests.e2e.cluster import Cluster, running_cluster
from tests.engine.kernels.calls import kernels_folder
from tests.random_models import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_TOKENS = 20
LONG_ANSWER = 160  # tokens


def coupled(
    model: Path, kept: str, block_size: int, prompts: list[list[int]], num_tokens: int = NUM_TOKENS
) -> list[list[int]]:
    """What native kernels in one process continue each prompt with."""
    config = load_model_config(model)
    engine = Engine.load(
        model,
        config=config,
        layout=config.kv_layout(block_size, "float32", kept),
        dtype="float32",
        num_blocks=8192 // block_size,
        cache_folder=kernels_folder(),
    )
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    return [generation.token_ids for generation in generate(engine, prompts, sampling)]


def ask(
    cluster: Cluster, prompt: Sequence[int], num_tokens: int = NUM_TOKENS
) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were cached."""
    answer = cluster.complete(
        prompt, max_tokens=num_tokens, temperature=0, ignore_eos=True, return_token_ids=True
    )
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["token_ids"], cached


def take(
    cluster: Cluster, prompts: list[list[int]], num_tokens: int = NUM_TOKENS
) -> tuple[list[list[int]], list[int]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: ask(cluster, prompt, num_tokens), prompts))
    return [tokens for tokens, _ in answers], [cached for _, cached in answers]


def test_answers_are_those_of_one_engine(tmp_path: Path) -> None:
    """With blocks of 512 tokens, too."""
    kept, block_size = "int8", 512
    model = tmp_path / "model"
    make_model("llama", model, seed=1, max_position_embeddings=4_096)
    dice = random.Random(0)
    prompts = [dice.choices(range(250), k=length) for length in (5, 100, 512, 513, 1_100)]
    reusable = [(len(prompt) - 1) // block_size * block_size for prompt in prompts]
    expected = coupled(model, kept, block_size, prompts)
    flags = (
        *("--dtype", "float32", "--kv-cache-dtype", kept, "--block-size", str(block_size)),
        *("--num-threads", "1", "--store-reads", "always"),
    )
    with running_cluster(model, tmp_path / "logs", *flags) as cluster:
        assert take(cluster, prompts) == (expected, [0] * len(prompts))
        num_blocks = sum(len(prompt) // block_size for prompt in prompts)
        cluster.wait_for("the write-behind", lambda: stored_blocks(cluster) >= num_blocks)
        assert take(cluster, prompts) == (expected, reusable)
        epoch = cluster.epoch("prefill-0")
        os.kill(cluster.pids()["prefill-0"], signal.SIGKILL)
        cluster.wait_for("its successor", lambda: cluster.epoch("prefill-0") > epoch)
        assert take(cluster, prompts) == (expected, reusable)
        loaded = cluster.counters("prefill-0")["store_hit_blocks"]
        assert loaded * block_size >= sum(reusable)


def stored_blocks(cluster: Cluster) -> int:
    stores = [each for each in cluster.instances() if each["role"] == "store"]
    return sum(store["indexed_blocks"] for store in stores)


def test_what_gave_way_to_the_store_goes_on_as_if_it_had_stayed(tmp_path: Path) -> None:
    """Prompts of a group of two stages, each of which sends codes and scales of its own layers, to a decode worker that
    has room for two and a half of five answers: others give way, and their codes come back from the store."""
    kept, block_size, model = "fp8", 32, demo_model_path()
    dice = random.Random(1)
    prompts = [dice.choices(range(4_000), k=length) for length in (290, 310, 330, 350, 370)]
    expected = coupled(model, kept, block_size, prompts, LONG_ANSWER)
    layout = load_model_config(model).kv_layout(block_size, "float32", kept)
    flags = (
        *("--dtype", "float32", "--num-threads", "1", "--kv-cache-dtype", kept),
        *("--block-size", str(block_size), "--pipeline-parallel-size", "2"),
        *("--max-model-len", "640", "--kv-cache-memory", str(40 * layout.block_bytes)),
        *("--max-num-batched-tokens", "128", "--max-num-seqs", "16"),
        *("--block-allocation", "on-demand"),  # which lets more in than can stay
    )
    with running_cluster(model, tmp_path / "logs", *flags) as cluster:
        for _ in range(20):  # until they meet so that what gave way is read again
            tokens, _ = take(cluster, prompts, LONG_ANSWER)
            assert tokens == expected
            counters = cluster.counters("decode-0")
            if counters["fetched_blocks"]:
                break
        assert counters["preemptions_kept"] > 0, counters
        assert counters["fetched_blocks"] > 0, counters
        assert cluster.counters("prefill-0")["handed_off_requests"] >= len(prompts)
        assert not cluster.tracebacks()
