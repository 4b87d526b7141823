"""The engine's tokens and log-probabilities are those of transformers on the same weights, whatever computes layers."""

from __future__ import annotations

import pytest

from engine.engine import Engine
from protocol.request import SamplingParams
from tests.engine.conftest import VARIANTS, Pair, tokens_of
from tests.engine.steps import make_slice, random_prompt
from tests.random_models import make_model

TEN = SamplingParams(max_tokens=10, temperature=0.0)


@pytest.fixture(scope="module", params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def engines(pairs: dict[str, Pair], kernels: str) -> dict[str, Engine]:
    return {name: pair.engine(kernels=kernels, attention=kernels) for name, pair in pairs.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(
    name: str, pairs: dict[str, Pair], engines: dict[str, Engine]
) -> None:
    """Alone, in chunks that divide nothing, and in one batch of very different lengths."""
    prompts = [random_prompt(length, seed=length) for length in (1, 2, 15, 16, 17, 100, 600)]
    pairs[name].check(engines[name], prompts, num_top=5, chunk_size=37)


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "qwen3-biases"])
def test_bfloat16_stays_close_to_float32(name: str, pairs: dict[str, Pair], kernels: str) -> None:
    off_by = pairs[name].off_by(pairs[name].engine(dtype="bfloat16", kernels=kernels))
    assert off_by.max() < 0.5
    assert off_by.mean() < 0.15


def test_dynamic_rope_equals_transformers_while_a_short_prompt_outgrows_the_trained_length(
    tmp_path_factory: pytest.TempPathFactory, kernels: str
) -> None:
    path = tmp_path_factory.mktemp("dynamic")
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    model = make_model("llama", path, max_position_embeddings=64, rope_parameters=rope)
    pair, prompt = Pair(path, model), random_prompt(60, seed=9)
    assert tokens_of(pair.engine(kernels=kernels), [prompt], 20) == [pair.generate(prompt, 20)]


def test_stale_bytes_behind_a_sequence_do_not_reach_it(llama: Pair, kernels: str) -> None:
    """A block's unwritten end may hold anything, NaN included, when a decode step first meets it."""
    engine = llama.engine(num_blocks=8, kernels=kernels, attention=kernels)
    prompt = random_prompt(20, seed=4)
    engine.memory[:] = b"\xff" * engine.memory.nbytes  # NaN in every element
    tokens, start = list(prompt), 0
    while len(tokens) < len(prompt) + 6:
        [sampled] = engine.execute([make_slice(tokens, start, len(tokens), [5, 2, 7])])
        assert sampled is not None
        start = len(tokens)
        tokens.append(sampled.token_id)
    assert tokens[len(prompt) :] == llama.generate(prompt, 6)
