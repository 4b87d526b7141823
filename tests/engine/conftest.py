"""Small random models of each supported family, made once per run, with transformers as the reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.harness.generate import generate
from moonserve.engine.engine import Engine
from moonserve.engine.model.config import load_model_config
from moonserve.protocol.request import SamplingParams
from tests.engine.kernels.calls import kernels_folder
from tests.engine.steps import load_engine, random_prompt
from tests.random_models import make_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
CLAMPED = {"swiglu_limit": 1.0}  # low enough to be met

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-biases-llama3": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}),
    "mistral-window": ("mistral", {"sliding_window": 48, "head_dim": 32}),
    "mistral-linear": ("mistral", {"sliding_window": None, "rope_parameters": LINEAR_ROPE}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    "qwen3-yarn": ("qwen3", {"head_dim": 32, "rope_parameters": YARN_ROPE}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 48}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40} | CLAMPED),
}
GROUPS = {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7}
PLAIN = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False}
MSCALES = {"mscale": 0.7, "mscale_all_dim": 1.3}
LATENTS: dict[str, tuple[str, dict[str, object]]] = {
    "deepseek-v2": ("deepseek_v2", {"q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek-v2-groups": ("deepseek_v2", {"q_lora_rank": 24, "rope_parameters": YARN_ROPE | MSCALES} | GROUPS),
    "deepseek-v3": ("deepseek_v3", {"q_lora_rank": 24, "rope_parameters": YARN_ROPE | MSCALES}),
    "deepseek-v3-plain": ("deepseek_v3", PLAIN),
}
"""Models with latent attention, which torch does not compute."""


@dataclass(frozen=True)
class Pair:
    """Checkpoint and the transformers model loaded from it."""

    path: Path
    reference: PreTrainedModel

    def engine(
        self, *, block_size: int = 16, kernels: str = "torch", attention: str = "torch", **options: Any
    ) -> Engine:
        """Loads the engine. Attention uses torch unless `attention` is given, whatever `kernels` the layers use. Of
        latent attention, native takes the place of torch's attention, and transformers of its layers."""
        if load_model_config(self.path).latent_heads is not None:
            kernels, attention = "transformers" if kernels == "torch" else kernels, "native"
        usual = {"num_blocks": 160, "cache_folder": kernels_folder()}
        return load_engine(self.path, block_size, kernels=kernels, attention=attention, **usual | options)

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Returns the reference's greedy continuation."""
        output = self.reference.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
        )
        return output[0, len(prompt) :].tolist()

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Returns the reference's log-probabilities after each token: [tokens, vocab]."""
        with torch.inference_mode():
            return torch.log_softmax(self.reference(torch.tensor([tokens])).logits[0].float(), -1)

    def check(self, engine: Engine, prompts: Sequence[list[int]], num_top: int = 1, **options: Any) -> None:
        """Requires that ten greedy tokens and their log-probabilities equal those of transformers."""
        sampling = SamplingParams(max_tokens=10, temperature=0.0, num_logprobs=num_top)
        results = generate(engine, prompts, sampling, **options)
        assert [one.token_ids for one in results] == [self.generate(one, 10) for one in prompts]
        for prompt, result in zip(prompts, results, strict=True):
            rows = self.logprobs(prompt + result.token_ids)[len(prompt) - 1 : -1]
            for row, token_id, found in zip(rows, result.token_ids, result.logprobs, strict=True):
                assert found.sampled == pytest.approx(float(row[token_id]), abs=1e-4)
                top = row.topk(num_top).values.tolist()
                assert [value for _, value in found.top] == pytest.approx(top, abs=1e-4)

    def off_by(self, engine: Engine) -> torch.Tensor:
        """Returns the absolute errors of ten log-probabilities against transformers for the same tokens."""
        sampling = SamplingParams(max_tokens=10, temperature=0.0, num_logprobs=1)
        prompt = random_prompt(70, seed=3)
        [result] = generate(engine, [prompt], sampling, chunk_size=32)
        rows = self.logprobs(prompt + result.token_ids)[len(prompt) - 1 : -1]
        expected = rows.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        found = torch.tensor([one.sampled for one in result.logprobs if one is not None])
        return (found - expected).abs()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    made: dict[str, Pair] = {}
    for name, (family, overrides) in (VARIANTS | LATENTS).items():
        path = tmp_path_factory.mktemp(name)
        made[name] = Pair(path, make_model(family, path, **overrides))
    return made


@pytest.fixture(scope="session")
def llama(pairs: dict[str, Pair]) -> Pair:
    return pairs["llama"]
