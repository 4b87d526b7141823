"""What is known of a prompt is not computed again: n choices share its blocks, and a second turn finds the first one's
answer. Shown by what workers count, not by time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import UNHURRIED, Cluster, cached_of, prompt_of, small_cluster, tokens_of

pytestmark = pytest.mark.e2e

BLOCK_SIZE = 16
FLAGS = (*UNHURRIED, "--block-size", str(BLOCK_SIZE), "--max-num-batched-tokens", "64")
SEEDED = {"temperature": 1.0, "seed": 7, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with small_cluster(tmp_path_factory.mktemp("shared"), *FLAGS) as made:
        yield made


def test_choices_of_one_prompt_share_its_blocks(cluster: Cluster) -> None:
    """Each has its own last block, which is written to (the copy of copy on write), and no other."""
    prompt, full = prompt_of("choices", 10 * BLOCK_SIZE + 5), 10
    names = ("device_hit_blocks", "shared_blocks", "landed_blocks")
    workers = ("prefill-0", "decode-0", "decode-0")
    before = [cluster.counter(*pair) for pair in zip(workers, names, strict=True)]
    answer = cluster.complete(prompt, n=4, max_tokens=6, **SEEDED)
    after = [cluster.counter(*pair) for pair in zip(workers, names, strict=True)]
    found, shared, landed = (b - a for a, b in zip(before, after, strict=True))
    assert found == 3 * full  # by the prefill worker, of its own
    assert shared == 3 * full  # granted by the decode worker without a byte sent
    assert landed == (full + 1) + 3
    seeds = ({**SEEDED, "seed": 7 + i} for i in range(4))
    alone = [tokens_of(cluster.complete(prompt, max_tokens=6, **seeded)) for seeded in seeds]
    assert [c["token_ids"] for c in answer["choices"]] == alone
    assert len({tuple(c["token_ids"]) for c in answer["choices"]}) > 1
    cluster.wait_until_all_is_free()


def test_a_second_turn_finds_the_first_ones_answer(cluster: Cluster) -> None:
    """All full blocks before the new words, though the prefill worker has never computed the answer's."""
    prompt = prompt_of("turn", 5 * BLOCK_SIZE + 3)
    kept = cluster.counter("decode-0", "kept_blocks")
    turn = cluster.complete(prompt, max_tokens=60, **SEEDED)
    known = [*prompt, *tokens_of(turn)]
    num_computed = (len(known) - 1) // BLOCK_SIZE  # the last token's KV never was
    num_answered = num_computed - len(prompt) // BLOCK_SIZE
    cluster.wait_for(
        "the answer's blocks in the store",
        lambda: cluster.counter("decode-0", "kept_blocks") - kept == num_answered,
    )
    stored = cluster.store().num_objects
    cluster.wait_for("the conductor's knowledge", lambda: cluster.num_indexed() >= stored)
    again = cluster.complete([*known, *prompt_of("words", 7)], max_tokens=2, **SEEDED)
    assert cached_of(again) == num_computed * BLOCK_SIZE
    assert cluster.counter("prefill-0", "store_hit_blocks") >= num_answered
