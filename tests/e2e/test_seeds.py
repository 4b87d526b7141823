"""In float32 a seed decides the text: not the batch, not the worker's caches, not what else is going on."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from models import demo_model_path
from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.load import BackgroundLoad

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

VOCAB_SIZE = 4_096  # of the demo model
NUM_TOKENS = 64
REPETITIONS = 20
PROMPT = "Once upon a time there was a"

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
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("seeds")
    model = shutil.copytree(demo_model_path(), folder / "model")
    flags = ("--dtype", "float32", "--num-threads", "1")
    with running_cluster(model, folder / "logs", *flags) as cluster:
        yield cluster


def say(cluster: Cluster, **parameters: Any) -> list[Said]:
    """Every choice of one sampled request."""
    wish = {"max_tokens": NUM_TOKENS, "temperature": 1, "seed": 11, "ignore_eos": True}
    answer = cluster.complete(PROMPT, return_token_ids=True, **{**wish, **parameters})
    said = [(choice["text"], tuple(choice["token_ids"])) for choice in answer["choices"]]
    assert all(len(token_ids) == NUM_TOKENS for _, token_ids in said)
    return said


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
