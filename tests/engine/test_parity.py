"""The engine's tokens and log-probabilities are those of transformers on the same weights, whatever computes layers."""

from __future__ import annotations

import pytest
import torch

from engine.engine import Engine
from engine.generate import generate
from protocol.request import SamplingParams
from tests.engine.conftest import VARIANTS, Pair
from tests.engine.steps import GREEDY, make_slice, random_prompt

TEN = SamplingParams(max_tokens=10, temperature=0.0, num_logprobs=5)


@pytest.fixture(scope="module", params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def engines(pairs: dict[str, Pair], kernels: str) -> dict[str, Engine]:
    return {name: pair.engine(kernels=kernels) for name, pair in pairs.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(
    name: str, pairs: dict[str, Pair], engines: dict[str, Engine]
) -> None:
    """Alone, in chunks that divide nothing, and in one batch of very different lengths."""
    prompts = [random_prompt(length, seed=length) for length in (1, 2, 15, 16, 17, 100, 600)]
    expected = [pairs[name].generate(prompt, 10) for prompt in prompts]
    results = generate(engines[name], prompts, TEN, chunk_size=37)
    assert [result.token_ids for result in results] == expected
    for prompt, result in zip(prompts, results, strict=True):
        reference = pairs[name].logprobs(prompt + result.token_ids)[len(prompt) - 1 :]
        for row, token_id, found in zip(reference, result.token_ids, result.logprobs, strict=False):
            assert found is not None
            assert found.sampled == pytest.approx(float(row[token_id]), abs=1e-4)
            top = row.topk(5).values.tolist()
            assert [value for _, value in found.top] == pytest.approx(top, abs=1e-4)


@pytest.mark.parametrize("chunk_size", [1, 16, 33, 64, 1000])
def test_the_chunk_size_does_not_change_tokens(
    chunk_size: int, llama: Pair, engines: dict[str, Engine]
) -> None:
    prompt = random_prompt(130 if chunk_size > 1 else 40, seed=5)
    [result] = generate(engines["llama"], [prompt], TEN, chunk_size=chunk_size)
    assert result.token_ids == llama.generate(prompt, 10)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3-yarn"])
def test_a_reused_prefix_gives_the_tokens_of_a_computed_one(
    name: str, pairs: dict[str, Pair], engines: dict[str, Engine]
) -> None:
    shared = random_prompt(100, seed=1)
    prompts = [shared + random_prompt(20, seed=seed) for seed in (2, 3, 4)] + [shared[:96]]
    results = generate(
        engines[name], prompts, TEN, chunk_size=64, max_num_seqs=1, enable_prefix_caching=True
    )
    assert [result.cached_tokens for result in results] == [0, 96, 96, 80]
    assert [result.token_ids for result in results] == [
        pairs[name].generate(prompt, 10) for prompt in prompts
    ]


def test_a_sequence_ignores_what_else_is_in_its_batch(llama: Pair, kernels: str) -> None:
    """A decode step beside a prompt chunk and other decodes samples what it samples alone."""
    engine = llama.engine(kernels=kernels)
    tokens = random_prompt(60, seed=7)
    other = random_prompt(90, seed=8)
    logprobs = SamplingParams(max_tokens=8, temperature=0.0, num_logprobs=3)
    blocks, other_blocks, third_blocks = range(0, 8), range(8, 16), range(16, 24)
    engine.execute([make_slice(tokens, 0, 59, blocks)])
    engine.execute([make_slice(other, 0, 89, third_blocks, request_id="third")])
    own = make_slice(tokens, 59, 60, blocks, sampling=logprobs)
    [alone] = engine.execute([own])
    mixed = engine.execute(
        [
            make_slice(other, 0, 50, other_blocks, request_id="other"),
            own,
            make_slice(other, 89, 90, third_blocks, request_id="third"),
        ]
    )
    assert mixed[0] is None
    assert alone is not None
    assert mixed[1] is not None
    assert mixed[1].token_id == alone.token_id
    assert alone.logprobs is not None
    assert mixed[1].logprobs is not None
    assert mixed[1].logprobs.sampled == pytest.approx(alone.logprobs.sampled, abs=1e-5)
    assert mixed[2] is not None
    assert mixed[2].token_id == llama.generate(other, 1)[0]


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "qwen3-biases"])
def test_bfloat16_stays_close_to_float32(name: str, pairs: dict[str, Pair], kernels: str) -> None:
    prompt = random_prompt(70, seed=3)
    engine = pairs[name].engine(dtype="bfloat16", kernels=kernels)
    [result] = generate(engine, [prompt], TEN, chunk_size=32)
    reference = pairs[name].logprobs(prompt + result.token_ids)[len(prompt) - 1 : -1]
    found = torch.tensor([one.sampled for one in result.logprobs if one is not None])
    expected = reference.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
    assert (found - expected).abs().max() < 0.5
    assert (found - expected).abs().mean() < 0.15


def test_dynamic_rope_equals_transformers_while_a_short_prompt_outgrows_the_trained_length(
    tmp_path_factory: pytest.TempPathFactory, kernels: str
) -> None:
    from tests.random_models import make_model

    path = tmp_path_factory.mktemp("dynamic")
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    model = make_model("llama", path, max_position_embeddings=64, rope_parameters=rope)
    pair = Pair(path, model)
    prompt = random_prompt(60, seed=9)
    [result] = generate(
        pair.engine(kernels=kernels), [prompt], SamplingParams(max_tokens=20, temperature=0.0)
    )
    assert result.token_ids == pair.generate(prompt, 20)


def test_stale_bytes_behind_a_sequence_do_not_reach_it(llama: Pair, kernels: str) -> None:
    """A block's unwritten end may hold anything, NaN included, when a decode step first meets it."""
    engine = llama.engine(num_blocks=8, kernels=kernels)
    prompt = random_prompt(20, seed=4)
    expected = llama.generate(prompt, 6)
    engine.memory[:] = b"\xff" * engine.memory.nbytes  # NaN in every element
    tokens = list(prompt)
    start = 0
    while len(tokens) < len(prompt) + 6:
        [sampled] = engine.execute(
            [make_slice(tokens, start, len(tokens), [5, 2, 7], sampling=GREEDY)]
        )
        assert sampled is not None
        start = len(tokens)
        tokens.append(sampled.token_id)
    assert tokens[len(prompt) :] == expected
