"""The reference loop: batching, limits and ends."""

from __future__ import annotations

import pytest

from engine.generate import generate
from protocol.errors import InvalidRequest
from protocol.request import FinishReason, SamplingParams
from tests.engine.conftest import Pair
from tests.engine.steps import random_prompt


def test_more_sequences_than_fit_wait_for_their_turn(llama: Pair) -> None:
    prompts = [random_prompt(30, seed=seed) for seed in range(6)]
    sampling = SamplingParams(max_tokens=5, temperature=0.0)
    results = generate(llama.engine(num_blocks=7), prompts, sampling)
    assert [one.token_ids for one in results] == [llama.generate(prompt, 5) for prompt in prompts]
    assert {one.finish_reason for one in results} == {FinishReason.LENGTH}


def test_a_stop_token_ends_a_sequence_and_min_tokens_delays_it(llama: Pair) -> None:
    prompt = random_prompt(30, seed=1)
    plain = llama.generate(prompt, 8)
    stop = SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=frozenset({plain[2]}))
    [result] = generate(llama.engine(), [prompt], stop)
    assert result.token_ids == plain[: plain.index(plain[2]) + 1]
    assert result.finish_reason is FinishReason.STOP
    late = SamplingParams(
        max_tokens=8, temperature=0.0, stop_token_ids=frozenset({plain[2]}), min_tokens=8
    )
    [result] = generate(llama.engine(), [prompt], late)
    assert len(result.token_ids) == 8
    assert plain[2] not in result.token_ids


def test_a_seeded_stream_does_not_depend_on_its_company(llama: Pair) -> None:
    engine = llama.engine()
    prompts = [random_prompt(20 + seed, seed=seed) for seed in range(4)]
    wishes = [SamplingParams(max_tokens=12, temperature=0.9, seed=seed) for seed in range(4)]
    together = generate(engine, prompts, wishes, chunk_size=16)
    for prompt, wish, result in zip(prompts, wishes, together, strict=True):
        [alone] = generate(engine, [prompt], wish)
        assert alone.token_ids == result.token_ids


def test_a_stream_continues_where_another_left_off(llama: Pair) -> None:
    """Prompt plus tokens already sent, with the same seed, goes on with the same tokens."""
    engine = llama.engine()
    prompt = random_prompt(25)
    wish = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    [whole] = generate(engine, [prompt], wish)
    [rest] = generate(
        engine,
        [prompt + whole.token_ids[:5]],
        SamplingParams(max_tokens=7, temperature=1.0, seed=3),
    )
    assert whole.token_ids[5:] == rest.token_ids


def test_prompts_that_cannot_run_are_refused(llama: Pair) -> None:
    sampling = SamplingParams(max_tokens=5)
    with pytest.raises(InvalidRequest, match="do not fit"):
        generate(llama.engine(num_blocks=2), [random_prompt(40)], sampling)
    with pytest.raises(InvalidRequest, match="at least one token"):
        generate(llama.engine(num_blocks=2), [[]], sampling)
