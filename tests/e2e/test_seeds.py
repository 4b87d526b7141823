"""In float32 a seed decides the text: not the batch, not the worker's caches, not what else is going on."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from models import demo_model_path
from tests.e2e.cluster import Cluster, metric, running_cluster
from tests.e2e.load import BackgroundLoad
from tests.thoroughness import THOROUGH

pytestmark = pytest.mark.e2e

VOCAB_SIZE = 4_096  # of the demo model
NUM_TOKENS = 64
REPETITIONS = 20 if THOROUGH else 4
FLAGS = ("--dtype", "float32", "--num-threads", "1")
# Of a sequence that has LONG tokens this pool holds one and a third, so two that meet in it cannot both end there.
LONG = 280
CRAMPED = (
    *("--max-model-len", "320", "--kv-cache-memory", str(26 * 96 * 2**10), "--block-size", "16"),
    *("--max-num-batched-tokens", "50", "--max-num-seqs", "32", "--prefill-workers", "2"),
    *("--block-allocation", "on-demand"),  # which lets more in than can stay
)
PROMPT = "Once upon a time there was a"
LONG_PROMPT = "Once upon a time there was a little girl named Lily who lived in a small house by a big forest and"
"""Of more than a block, so that there is something to keep."""

# Each changes what the plain request would say.
VARIATIONS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.2},
    "cold": {"temperature": 0.3},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "all": {"top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
}

Said = tuple[str, tuple[int, ...]]  # a choice's text and tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: the original may be trained on meanwhile."""
    return shutil.copytree(demo_model_path(), tmp_path_factory.mktemp("seeds") / "model")


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(model, tmp_path_factory.mktemp("logs"), *FLAGS) as cluster:
        yield cluster


def say(cluster: Cluster, prompt: str = PROMPT, **parameters: Any) -> list[Said]:
    """Every choice of one sampled request."""
    wish = {"max_tokens": NUM_TOKENS, "temperature": 1, "seed": 11, "ignore_eos": True}
    answer = cluster.complete(prompt, return_token_ids=True, **{**wish, **parameters})
    return [(choice["text"], tuple(choice["token_ids"])) for choice in answer["choices"]]


@pytest.mark.slow
def test_a_seed_gives_the_same_text_whatever_else_is_in_the_batch(cluster: Cluster) -> None:
    alone = say(cluster)
    dice = random.Random(0)
    for repetition in range(1, REPETITIONS):
        streams = dice.randint(1, 9)
        with BackgroundLoad(cluster, VOCAB_SIZE, streams=streams, seed=repetition):
            assert say(cluster) == alone, f"repetition {repetition} beside {streams} streams"


def test_different_seeds_give_different_texts(cluster: Cluster) -> None:
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda seed: say(cluster, seed=seed)[0], range(8)))
    assert len(set(said)) == 8


def test_no_seed_is_another_seed_every_time(cluster: Cluster) -> None:
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda _: say(cluster, seed=None)[0], range(4)))
    assert len(set(said)) == 4


def test_two_choices_of_a_seed_differ_and_come_again(cluster: Cluster) -> None:
    first = say(cluster, n=2)
    assert len(set(first)) == 2
    with BackgroundLoad(cluster, VOCAB_SIZE, streams=5):
        assert [say(cluster, n=2) for _ in range(2)] == [first, first]
        assert say(cluster, n=3)[:2] == first
        assert say(cluster) == first[:1]


def test_every_way_to_sample_is_as_repeatable(cluster: Cluster) -> None:
    """Three times each, all of them at once, in other company every time."""
    plain = say(cluster)[0]
    favourite = max(set(plain[1]), key=plain[1].count)
    banned = {"logit_bias": {str(favourite): -100}}
    variations = [*VARIATIONS.values(), banned]
    with ThreadPoolExecutor(len(variations)) as pool:
        rounds = []
        for streams in (1, 4, 7):
            with BackgroundLoad(cluster, VOCAB_SIZE, streams=streams, seed=streams):
                rounds.append(list(pool.map(lambda wish: say(cluster, **wish)[0], variations)))
    assert rounds == [rounds[0]] * 3
    assert len({plain, *rounds[0]}) == 1 + len(variations), "a parameter changed nothing"
    assert favourite not in rounds[0][-1][1]


@pytest.mark.slow
def test_another_cluster_that_preempts_gives_the_same_text(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    """Other blocks, chunks and workers, and so little memory that sequences are evicted, and read from the store or
    computed again, whichever is cheaper here. Whether they meet is up to the machine, so they come again until one was
    evicted. What is computed again differs in the last bits, so draws are among few tokens: among thousands some would
    fall within 1e-6 of where the next token begins."""
    seeds = range(100, 112 if THOROUGH else 104)

    def long_one(cluster: Cluster, seed: int) -> list[Said]:
        return say(cluster, LONG_PROMPT, seed=seed, max_tokens=LONG, top_k=5)

    with ThreadPoolExecutor(len(seeds)) as pool:
        expected = list(pool.map(lambda seed: long_one(cluster, seed), seeds))
        with running_cluster(model, tmp_path, *FLAGS, *CRAMPED) as cramped:
            counted = 0
            for _ in range(20):
                found = pool.map(lambda seed: long_one(cramped, seed), seeds)
                assert list(found) == expected
                if counted := cramped.counters("decode-0")["num_preemptions"]:
                    break
            assert counted > 0
            cramped.wait_for("the metric", lambda: preemptions(cramped) == counted)


def preemptions(cluster: Cluster) -> float:
    """As the gateway's metrics tell."""
    with cluster.client() as client:
        return metric(client.get("/metrics").text, "vllm:num_preemptions_total")
