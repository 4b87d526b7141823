"""What is known of a prompt is not computed again: n choices share its blocks, and a second turn finds the first one's
answer. Shown by what workers count, not by time."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.e2e.accounts import Accounts, accounts_of
from tests.e2e.cluster import UNHURRIED, Cluster, running_cluster
from tests.random_models import make_model

pytestmark = pytest.mark.e2e

BLOCK_SIZE = 16
FLAGS = (*UNHURRIED, "--block-size", str(BLOCK_SIZE), "--max-num-batched-tokens", "64")
SEEDED = {"temperature": 1.0, "seed": 7, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("shared")
    make_model("llama", folder / "model")
    with running_cluster(folder / "model", folder / "logs", *FLAGS) as made:
        yield made


@pytest.fixture
def accounts(cluster: Cluster) -> Iterator[Accounts]:
    with accounts_of(cluster) as made:
        yield made


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def test_choices_of_one_prompt_share_its_blocks(cluster: Cluster, accounts: Accounts) -> None:
    """Each has its own last block, which is written to (the copy of copy on write), and no other."""
    prompt, full = prompt_of(10 * BLOCK_SIZE + 5, seed=1), 10
    names = ("device_hit_blocks", "shared_blocks", "landed_blocks")
    workers = ("prefill-0", "decode-0", "decode-0")
    before = [accounts.counter(*pair) for pair in zip(workers, names, strict=True)]
    answer = cluster.complete(prompt, n=4, max_tokens=6, **SEEDED)
    after = [accounts.counter(*pair) for pair in zip(workers, names, strict=True)]
    found, shared, landed = (b - a for a, b in zip(before, after, strict=True))
    assert found == 3 * full  # by the prefill worker, of its own
    assert shared == 3 * full  # granted by the decode worker without a byte sent
    assert landed == (full + 1) + 3
    alone = [
        cluster.complete(prompt, max_tokens=6, **{**SEEDED, "seed": 7 + i})["choices"][0]
        for i in range(4)
    ]
    assert [c["token_ids"] for c in answer["choices"]] == [c["token_ids"] for c in alone]
    assert len({tuple(c["token_ids"]) for c in answer["choices"]}) > 1
    accounts.wait_until_all_is_free()


def test_a_second_turn_finds_the_first_ones_answer(cluster: Cluster, accounts: Accounts) -> None:
    """All full blocks before the new words, though the prefill worker has never computed the answer's."""
    prompt = prompt_of(5 * BLOCK_SIZE + 3, seed=2)
    kept = accounts.counter("decode-0", "kept_blocks")
    turn = cluster.complete(prompt, max_tokens=60, **SEEDED)
    known = [*prompt, *turn["choices"][0]["token_ids"]]
    num_computed = (len(known) - 1) // BLOCK_SIZE  # the last token's KV never was
    num_answered = num_computed - len(prompt) // BLOCK_SIZE
    cluster.wait_for(
        "the answer's blocks in the store",
        lambda: accounts.counter("decode-0", "kept_blocks") - kept == num_answered,
    )
    stored = accounts.store().num_objects
    cluster.wait_for(
        "the conductor's knowledge of them",
        lambda: (
            sum(i["indexed_blocks"] for i in cluster.instances() if i["role"] == "store") >= stored
        ),
    )
    again = cluster.complete([*known, *prompt_of(7, seed=3)], max_tokens=2, **SEEDED)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == num_computed * BLOCK_SIZE
    assert accounts.counter("prefill-0", "store_hit_blocks") >= num_answered
