"""Log-probabilities of a prompt's own tokens are those of transformers, however the prompt is cut into chunks and
whatever shares its steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.batch import PromptScores
from engine.engine import Engine
from protocol.prompt_logprobs import PromptLogprobs
from tests.engine.conftest import Pair
from tests.engine.steps import make_slice, random_prompt

NUM_TOP = 3
PROMPT = random_prompt(70, seed=3)
BLOCKS = list(range(5))


@pytest.fixture(scope="module", params=["torch", "native"])
def engine(request: pytest.FixtureRequest, llama: Pair) -> Engine:
    return llama.engine(kernels=request.param)


def scored(engine: Engine, chunks: list[int], tokens: list[int] = PROMPT) -> PromptLogprobs:
    """`chunks`: where they end."""
    scores = PromptScores(NUM_TOP)
    for start, end in zip([0, *chunks], chunks, strict=False):
        piece = replace(make_slice(tokens, start, end, BLOCKS), scores=scores)
        [sampled] = engine.execute([piece])
        assert (sampled is not None) == (end == len(tokens))
    return scores.result()


def check(found: PromptLogprobs, llama: Pair, tokens: list[int] = PROMPT) -> None:
    reference = llama.logprobs(tokens)[:-1]
    own = reference.gather(1, reference.new_tensor(tokens[1:]).long()[:, None])
    np.testing.assert_allclose(found.logprobs, own[:, 0], atol=1e-4)
    best = reference.topk(NUM_TOP)
    np.testing.assert_allclose(found.top_logprobs, best.values, atol=1e-4)
    np.testing.assert_array_equal(found.top_ids, best.indices)
    np.testing.assert_array_equal(found.ranks, (reference > own).sum(-1) + 1)


@pytest.mark.parametrize("chunks", [[70], [1, 2, 33, 70], [69, 70]], ids=str)
def test_they_are_those_of_transformers_in_any_chunks(engine: Engine, llama: Pair, chunks: list[int]) -> None:
    check(scored(engine, chunks), llama)


def test_what_is_computed_again_from_the_beginning_replaces_what_there_was(engine: Engine, llama: Pair) -> None:
    """As after a preemption."""
    scores = PromptScores(NUM_TOP)
    for start, end in ((0, 20), (20, 50), (0, 30), (30, 70)):
        engine.execute([replace(make_slice(PROMPT, start, end, BLOCKS), scores=scores)])
    check(scores.result(), llama)


def test_who_shares_the_step_samples_the_same(engine: Engine, llama: Pair) -> None:
    """Two scored prompts, one of which samples, around one that only samples."""
    other = random_prompt(30, seed=9)
    [alone] = engine.execute([make_slice(other, 0, 30, [20, 21], request_id="b")])
    first, third = PromptScores(NUM_TOP), PromptScores(NUM_TOP)
    results = engine.execute(
        [
            replace(make_slice(PROMPT, 0, 40, BLOCKS), scores=first),
            make_slice(other, 0, 30, [20, 21], request_id="b"),
            replace(make_slice(PROMPT, 0, 70, list(range(10, 15)), request_id="c"), scores=third),
        ]
    )
    assert results[0] is None
    assert results[1] == alone
    assert results[2] is not None
    assert results[2].token_id == llama.generate(PROMPT, 1)[0]
    check(third.result(), llama)
    np.testing.assert_allclose(first.result().logprobs, third.result().logprobs[:40], atol=1e-4)
