"""Ranks that share a model sample the tokens of transformers, and their KV equals that of one engine."""

import pytest

from benchmarks.harness.generate import generate
from moonserve.protocol.request import SamplingParams
from tests.engine.conftest import VARIANTS, Pair
from tests.engine.steps import random_prompt, tokens_of
from tests.engine.tensor_parallel.threaded_ranks import threaded_ranks
from tests.random_models import make_model

TEN = SamplingParams(max_tokens=10, temperature=0.0, num_logprobs=5)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Model with four KV heads, for four ranks, and a vocabulary that is not divisible by four."""
    path = tmp_path_factory.mktemp("wide")
    return Pair(path, make_model("llama", path, num_key_value_heads=4, vocab_size=259))


def prompts_of(*lengths: int) -> list[list[int]]:
    return [random_prompt(length, seed=length, vocab_size=254) for length in lengths]


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize(("name", "num_ranks"), [*((name, 2) for name in VARIANTS), ("wide", 4)])
def test_ranks_give_the_tokens_of_transformers(
    name: str, num_ranks: int, kernels: str, pairs: dict[str, Pair], wide: Pair
) -> None:
    """Covers every family, with biases and windows, and both kernels."""
    pair = wide if name == "wide" else pairs[name]
    with threaded_ranks(pair.path, num_ranks, kernels=kernels) as engine:
        pair.check(engine, prompts_of(1, 15, 17, 300), chunk_size=37)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_ranks_support_quantised_kv(kernels: str, wide: Pair) -> None:
    """The row of a head (codes and a scale) belongs to a single rank."""
    alone = wide.engine(kv_dtype="int8", num_blocks=64, kernels=kernels, attention=kernels)
    prompts = prompts_of(30, 100)
    with threaded_ranks(wide.path, 2, kernels=kernels, kv_dtype="int8") as engine:
        assert engine.fingerprint == alone.fingerprint
        assert tokens_of(engine, prompts, 10) == tokens_of(alone, prompts, 10)


def test_bits_do_not_depend_on_the_rest_of_the_step(wide: Pair) -> None:
    """Sums are taken in rank order wherever a row lies, so a sequence decodes the same alone and in a batch."""
    prompts = prompts_of(40, 41, 42)
    with threaded_ranks(wide.path, 4) as engine:
        alone = [generate(engine, [prompt], TEN)[0] for prompt in prompts]
        together = generate(engine, prompts, TEN)
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
