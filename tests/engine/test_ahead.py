"""Steps that are begun before the one before them has ended say what they say one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.generate import generate
from protocol.errors import InvalidRequest
from protocol.request import SamplingParams
from tests.engine.ahead import decode_ahead
from tests.engine.conftest import Pair
from tests.engine.steps import GREEDY, make_slice, random_prompt

NUM_TOKENS = 8
PROMPTS = [random_prompt(length, seed=length) for length in (1, 15, 16, 40)]
WISHES = {
    "greedy": GREEDY,
    "seeded": SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=3),
    "penalised": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, repetition_penalty=1.7, frequency_penalty=0.8),
    "not to end yet": SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.0, min_tokens=4, stop_token_ids=tuple(range(200))
    ),
}


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("name", [*WISHES, "mixed"])
def test_tokens_are_those_of_steps_one_after_the_other(llama: Pair, name: str, kernels: str) -> None:
    wishes = list(WISHES.values()) if name == "mixed" else [WISHES[name]] * len(PROMPTS)
    engine = llama.engine(kernels=kernels)
    found = decode_ahead(engine, PROMPTS, wishes, NUM_TOKENS)
    wishes = [replace(wish, max_tokens=NUM_TOKENS) for wish in wishes]
    expected = [one.token_ids for one in generate(llama.engine(kernels=kernels), PROMPTS, wishes)]
    for own, theirs in zip(found, expected, strict=True):
        assert own[: len(theirs)] == theirs, "a stop token ends only the other"
        assert len(theirs) >= 4


def test_a_slice_that_follows_nothing_is_refused(llama: Pair) -> None:
    engine = llama.engine(num_blocks=4)
    prompt = random_prompt(5)
    follower = replace(make_slice(prompt, 4, 5, [0]), start=5, end=6, follows=True)
    with pytest.raises(InvalidRequest, match="it follows no step"):
        engine.begin([follower])
    engine.begin([make_slice(prompt, 0, 5, [0], request_id="another")]).end()
    with pytest.raises(InvalidRequest, match="sampled no token for it"):
        engine.begin([follower])


def test_a_step_without_slices_ends_with_nothing(llama: Pair) -> None:
    assert llama.engine(num_blocks=4).begin([]).end() == []
