"""Random models, made once per run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import load_model_config
from engine.engine import Engine
from tests.engine.kernels.calls import kernels_folder
from tests.random_models import make_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-biases-llama3": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "mistral-window": ("mistral", {"sliding_window": 48, "head_dim": 32}),
    "mistral-linear": ("mistral", {"sliding_window": None, "rope_parameters": LINEAR_ROPE}),
    "qwen2": ("qwen2", {"head_dim": None, "tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {
            "head_dim": None,
            "use_sliding_window": True,
            "sliding_window": 40,
            "max_window_layers": 1,
        },
    ),
    "qwen3-yarn": ("qwen3", {"head_dim": 32, "rope_parameters": YARN_ROPE}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
}


@dataclass(frozen=True)
class Pair:
    """A checkpoint and what transformers makes of it."""

    path: Path
    reference: PreTrainedModel

    def engine(
        self,
        *,
        dtype: str = "float32",
        block_size: int = 16,
        num_blocks: int = 160,
        kernels: str = "torch",
    ) -> Engine:
        """`kernels` compute the layers; attention is torch's."""
        config = load_model_config(self.path)
        return Engine.load(
            self.path,
            config=config,
            layout=config.kv_layout(block_size, dtype),
            num_blocks=num_blocks,
            kernels=kernels,
            attention="torch",
            cache_folder=kernels_folder(),
        )

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The reference's greedy continuation."""
        output = self.reference.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """The reference's log-probabilities after each token: [tokens, vocab]."""
        with torch.inference_mode():
            return torch.log_softmax(self.reference(torch.tensor([tokens])).logits[0].float(), -1)


@pytest.fixture(scope="session")
def kernels() -> Path:
    """Where compiled kernels are kept."""
    return kernels_folder()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    made: dict[str, Pair] = {}
    for name, (family, overrides) in VARIANTS.items():
        path = tmp_path_factory.mktemp(name)
        fields = {key: value for key, value in overrides.items() if value is not None}
        if overrides.get("sliding_window", 0) is None:
            fields["sliding_window"] = None
        made[name] = Pair(path, make_model(family, path, **fields))
    return made


@pytest.fixture(scope="session")
def llama(pairs: dict[str, Pair]) -> Pair:
    return pairs["llama"]
