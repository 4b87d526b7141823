"""Engines with any block size sample the tokens of transformers, and quantised KV stays near float32."""

import pytest

from benchmarks.harness.generate import generate
from moonserve.engine.model.config import load_model_config
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.request import SamplingParams
from tests.engine.conftest import Pair
from tests.engine.steps import random_prompt

TEN = SamplingParams(max_tokens=10, temperature=0.0)


@pytest.mark.parametrize("block_size", [1, 16, 24, 100, 512, 1024])
def test_any_block_size_gives_the_tokens_of_transformers(block_size: int, llama: Pair) -> None:
    """Block sizes need not be powers of two, and may be below 16 or above 512."""
    engine = llama.engine(block_size=block_size, num_blocks=2048 // block_size, attention="auto")
    shared = random_prompt(600, seed=1)
    prompts = [random_prompt(31, seed=2), shared, shared[:560] + random_prompt(9, seed=3)]
    results = generate(engine, prompts, TEN, chunk_size=200, max_num_seqs=1, enable_prefix_caching=True)
    cached = [0, 0, 560 // block_size * block_size]
    assert [one.cached_tokens for one in results] == cached
    assert [one.token_ids for one in results] == [llama.generate(one, 10) for one in prompts]


@pytest.mark.parametrize(("kept", "bound"), [("int8", 0.1), ("fp8", 0.5)])
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_quantised_kv_stays_near_float32(kept: str, bound: float, kernels: str, llama: Pair) -> None:
    off_by = llama.off_by(llama.engine(kv_dtype=kept, kernels=kernels, attention=kernels))
    assert off_by.max() < bound
    assert off_by.mean() < bound / 3


def test_unsupported_kv_dtype_is_refused(llama: Pair) -> None:
    config = load_model_config(llama.path)
    assert config.kv_layout(16, "float32", "float32").dtype == "float32"
    with pytest.raises(ConfigError, match="KV in bfloat16 with a model in float32"):
        config.kv_layout(16, "float32", "bfloat16")
    with pytest.raises(ConfigError, match="'int4' is not one of float32, bfloat16, fp8, int8"):
        config.kv_layout(16, "float32", "int4")
    for part in ("kernels", "attention"):
        with pytest.raises(ConfigError, match="KV in fp8 is for CPUs only"):
            llama.engine(kv_dtype="fp8", **{part: "triton"})
