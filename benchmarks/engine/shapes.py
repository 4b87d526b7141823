"""Models, dtypes, batches, contexts and prompts to measure. Every contestant imports it: standard library only.

The models beside the demo model are Llamas with random weights, MoE, a mixture of experts, and MLA, one with latent
attention. 110M is the one of the published comparison.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEMO_FOLDER = Path(__file__).parent.parent.parent / "models" / "demo"
MODELS = ("demo", "110M", "1B", "MoE", "MLA")
DTYPES = ("bfloat16", "float32")
BATCHES = (1, 8, 32)
CONTEXTS = (512, 2048)
PROMPTS = (512, 2048)

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
RANDOM: dict[str, dict[str, Any]] = {
    "110M": SMALL,
    "1B": SMALL
    | {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "MoE": SMALL
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 384,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "MLA": SMALL
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "moe_intermediate_size": 512,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "topk_method": "greedy",
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "head_dim": 64,
    },
}
"""The config.json of each model with random weights; 1B has the shapes of Llama 3.2. MoE is in the shape of Qwen3-MoE,
with a billion weights, of which a token uses a fifth; MLA in the shape of DeepSeek-V2-Lite, with its heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decode step or, if `prompt` is given, the prefill of a prompt of this length up to its first token."""

    batch: int = 1
    context: int = 0
    prompt: int | None = None

    @property
    def label(self) -> str:
        if self.prompt is not None:
            return f"prefill {self.prompt}"
        return f"B{self.batch} C{self.context}"


DECODES = [Shape(batch=batch, context=context) for context in CONTEXTS for batch in BATCHES]
PREFILLS = [Shape(prompt=prompt) for prompt in PROMPTS]
SHAPES = [*DECODES, *PREFILLS]


def prompt_tokens(seed: int, length: int, vocab_size: int) -> list[int]:
    """Returns the same tokens for every contestant. Shorter prompts are prefixes of longer ones; seeds share none."""
    numbers = random.Random(seed)
    return [3 + int(numbers.random() * (vocab_size - 3)) for _ in range(length)]
