"""A whole engine on Triton kernels gives the tokens of transformers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "triton", reason="Triton is not installed (690 MB): pip install 'moonserve[gpu]'"
)

from engine.config import load_model_config
from engine.engine import Engine
from engine.generate import generate
from protocol.errors import ConfigError
from protocol.request import SamplingParams
from tests.engine.ahead import decode_ahead
from tests.engine.conftest import Pair
from tests.engine.steps import GREEDY, random_prompt


def triton_engine(pair: Pair, device: torch.device) -> Engine:
    config = load_model_config(pair.path)
    return Engine.load(
        pair.path,
        config=config,
        layout=config.kv_layout(16, "float32"),
        num_blocks=40,
        device=str(device),
        kernels="triton",
        attention="triton",
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-biases-llama3", "mistral-window", "qwen3-biases"])
def test_tokens_equal_those_of_transformers(
    name: str, pairs: dict[str, Pair], device: torch.device
) -> None:
    engine = triton_engine(pairs[name], device)
    assert (engine.kernels_name, engine.attention_name) == ("triton", "triton")
    prompts = [random_prompt(length, seed=length) for length in (1, 70)]
    sampling = SamplingParams(max_tokens=3, temperature=0.0)
    results = generate(engine, prompts, sampling, chunk_size=50)
    assert [one.token_ids for one in results] == [
        pairs[name].generate(prompt, 3) for prompt in prompts
    ]


@pytest.mark.slow
def test_tokens_that_stay_on_the_device_are_those_of_transformers(
    llama: Pair, device: torch.device
) -> None:
    """One prompt is a single token, so that the rows of the first steps are in another order than their slices."""
    prompts = [random_prompt(length, seed=length) for length in (30, 1)]
    found = decode_ahead(triton_engine(llama, device), prompts, [GREEDY] * 2, 3)
    assert found == [llama.generate(prompt, 3) for prompt in prompts]


def test_a_device_that_is_not_here_is_refused(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        triton_engine(llama, torch.device("cuda"))
