"""Tokens and log-probabilities of the engine equal those of transformers on the same weights, with any kernels."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.harness.generate import generate
from moonserve.engine.engine import Engine
from moonserve.engine.model.batch import PromptScores
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.request import PromptLogprobs, SamplingParams
from tests.engine.conftest import LATENTS, VARIANTS, Pair
from tests.engine.steps import GREEDY, decode_ahead, make_slice, random_prompt, tokens_of
from tests.random_models import make_model


@pytest.fixture(scope="module", params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engines(pairs: dict[str, Pair], kernels: str) -> dict[str, Engine]:
    return {name: pair.engine(kernels=kernels, attention=kernels) for name, pair in pairs.items()}


@pytest.mark.parametrize("name", [*VARIANTS, *LATENTS])
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(
    name: str, pairs: dict[str, Pair], engines: dict[str, Engine]
) -> None:
    """Prompts run alone, in chunks of odd sizes, and in one batch of very different lengths."""
    prompts = [random_prompt(length, seed=length) for length in (1, 2, 15, 16, 17, 100, 600)]
    pairs[name].check(engines[name], prompts, num_top=5, chunk_size=37)


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "qwen3-biases", "mixtral", "gpt-oss", "deepseek-v2"])
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


def test_stale_bytes_behind_a_sequence_do_not_affect_it(llama: Pair, kernels: str) -> None:
    """The unwritten end of a block may hold anything, even NaN, when a decode step first reads the block."""
    engine = llama.engine(num_blocks=8, kernels=kernels, attention=kernels)
    prompt = random_prompt(20, seed=4)
    engine.memory[:] = b"\xff" * engine.memory.nbytes  # NaN in every element
    tokens, start = list(prompt), 0
    while len(tokens) < len(prompt) + 6:
        [sampled] = engine.execute([make_slice(tokens, start, len(tokens), [5, 2, 7])])
        start = len(tokens)
        tokens.append(sampled.token_id)
    assert tokens[len(prompt) :] == llama.generate(prompt, 6)


# -- steps that begin before the previous step has ended


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


@pytest.mark.parametrize("name", [*WISHES, "mixed"])
def test_steps_begun_ahead_give_the_tokens_of_sequential_steps(llama: Pair, name: str, kernels: str) -> None:
    wishes = list(WISHES.values()) if name == "mixed" else [WISHES[name]] * len(PROMPTS)
    engine = llama.engine(kernels=kernels)
    found = decode_ahead(engine, PROMPTS, wishes, NUM_TOKENS)
    wishes = [replace(wish, max_tokens=NUM_TOKENS) for wish in wishes]
    expected = [one.token_ids for one in generate(llama.engine(kernels=kernels), PROMPTS, wishes)]
    for own, theirs in zip(found, expected, strict=True):
        assert own[: len(theirs)] == theirs, "a stop token ends only the other"
        assert len(theirs) >= 4


def test_slice_that_follows_no_step_is_refused(llama: Pair) -> None:
    engine = llama.engine(num_blocks=4)
    prompt = random_prompt(5)
    follower = replace(make_slice(prompt, 4, 5, [0]), start=5, end=6, token_from_previous_step=True)
    with pytest.raises(InvalidRequest, match="no step was begun"):
        engine.begin([follower])
    engine.begin([make_slice(prompt, 0, 5, [0], request_id="another")]).end()
    with pytest.raises(InvalidRequest, match="sampled no token for this request"):
        engine.begin([follower])


# -- recomputed output


PROMPT_TOKENS, ALL_TOKENS = 37, 340
DECODED = [0, *range(PROMPT_TOKENS, ALL_TOKENS + 1)]
DRAWN = SamplingParams(max_tokens=ALL_TOKENS, temperature=1.0, seed=3, num_logprobs=5)


def computed(engine: Engine, tokens: Sequence[int], ends: Sequence[int]) -> tuple[bytes, object]:
    """Returns the pool's bytes and the result of sampling after the last token."""
    blocks = range(engine.layout.blocks_for(len(tokens)))
    engine.memory[:] = bytes(engine.memory.nbytes)
    for start, end in itertools.pairwise(ends):
        piece = make_slice(tokens, start, end, blocks, sampling=DRAWN, num_prompt_tokens=PROMPT_TOKENS)
        [sampled] = engine.execute([piece])
    return bytes(engine.memory), sampled


@pytest.mark.parametrize("kept", ["auto", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt-oss", "deepseek-v3"])
def test_recomputed_output_has_the_same_bits(
    name: str, dtype: str, kept: str, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output is recomputed in one step, and in chunks that end at or just before the prompt's end and in the output."""
    monkeypatch.setattr("moonserve.engine.kernels.native_attention._SINGLES_AT_ONCE", 100)
    engine = pairs[name].engine(dtype=dtype, kv_dtype=kept, kernels="native", attention="native", num_blocks=24)
    tokens = random_prompt(ALL_TOKENS, seed=1)
    decoded = computed(engine, tokens, DECODED)
    for again in ([0, ALL_TOKENS], [0, 20, 36, 37, 200, ALL_TOKENS], [0, 36, 38, 39, 339, ALL_TOKENS]):
        assert computed(engine, tokens, again) == decoded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_latent_attention_depend_neither_on_the_batch_nor_on_chunks_nor_on_threads(
    dtype: str, pairs: dict[str, Pair]
) -> None:
    sampling = SamplingParams(max_tokens=10, temperature=0.0, num_logprobs=5)
    prompts = [random_prompt(length, seed=length) for length in (1, 16, 70, 600)]
    engines = [pairs["deepseek-v3"].engine(dtype=dtype, kernels="native", num_threads=count) for count in (1, 3)]
    together = [generate(engine, prompts, sampling, chunk_size=37) for engine in engines]
    alone = [generate(engines[0], [prompt], sampling)[0] for prompt in prompts]
    assert together == [alone, alone]


# -- log-probabilities of prompt tokens


NUM_TOP = 3
SCORED = random_prompt(70, seed=3)
BLOCKS = list(range(5))


@pytest.fixture
def engine(engines: dict[str, Engine]) -> Engine:
    return engines["llama"]


def check(found: PromptLogprobs, llama: Pair) -> None:
    reference = llama.logprobs(SCORED)[:-1]
    own = reference.gather(1, torch.tensor(SCORED[1:])[:, None])
    np.testing.assert_allclose(found.logprobs, own[:, 0], atol=1e-4)
    best = reference.topk(NUM_TOP)
    np.testing.assert_allclose(found.top_logprobs, best.values, atol=1e-4)
    np.testing.assert_array_equal(found.top_ids, best.indices)
    np.testing.assert_array_equal(found.ranks, (reference > own).sum(-1) + 1)


@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 70)],
        [(0, 1), (1, 2), (2, 33), (33, 70)],
        [(0, 69), (69, 70)],
        [(0, 20), (20, 50), (0, 30), (30, 70)],  # starts again, as after a preemption
    ],
    ids=str,
)
def test_prompt_scores_equal_those_of_transformers_in_any_chunks(
    engine: Engine, llama: Pair, chunks: list[tuple[int, int]]
) -> None:
    scores = PromptScores(NUM_TOP)
    for start, end in chunks:
        [sampled] = engine.execute([replace(make_slice(SCORED, start, end, BLOCKS), scores=scores)])
        assert (sampled is not None) == (end == len(SCORED))
    check(scores.result(), llama)


def test_prompt_scores_do_not_affect_other_requests_in_the_step(engine: Engine, llama: Pair) -> None:
    """The step has two scored prompts, one of which samples, around one prompt that only samples."""
    other = random_prompt(30, seed=9)
    [alone] = engine.execute([make_slice(other, 0, 30, [20, 21], request_id="b")])
    first, third = PromptScores(NUM_TOP), PromptScores(NUM_TOP)
    results = engine.execute(
        [
            replace(make_slice(SCORED, 0, 40, BLOCKS), scores=first),
            make_slice(other, 0, 30, [20, 21], request_id="b"),
            replace(make_slice(SCORED, 0, 70, list(range(10, 15)), request_id="c"), scores=third),
        ]
    )
    assert results[0] is None
    assert results[1] == alone
    assert results[2].token_id == llama.generate(SCORED, 1)[0]
    check(third.result(), llama)
    np.testing.assert_allclose(first.result().logprobs, third.result().logprobs[:40], atol=1e-4)
