"""Small random checkpoints of the model families that the tests run in vLLM.

Prompts are lists of token ids, so the tokenizer only has to exist: its tokens are the ids in decimal.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB_SIZE = 1_024
SLIDING_WINDOW = 128
_EOS = VOCAB_SIZE - 1

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8_192,
    "bos_token_id": None,
    "eos_token_id": _EOS,
    "pad_token_id": _EOS,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
# As in the published checkpoints. With plain RoPE, vLLM 0.32 computes MLA wrongly on CPUs.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 4_096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: names of the transformers classes, and the fields in which its configuration differs."""

    config_class: str
    model_class: str
    overrides: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    """Further settings of vLLM's engine."""


FAMILIES = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3_moe": Family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_MIXTURE, "num_experts": 4}),
    # Every sixth layer attends to the whole prompt, as in the published checkpoints.
    "gemma3": Family(
        "Gemma3TextConfig", "Gemma3ForCausalLM", {"num_hidden_layers": 6, "sliding_window": SLIDING_WINDOW}
    ),
    "gpt_oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": SLIDING_WINDOW},
    ),
    "deepseek_v2": Family(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            **_MIXTURE,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "rope_parameters": _YARN,
        },
        # vLLM's other backend for CPUs computes in bfloat16, and needs AMX.
        {"attention_backend": "CPU_MLA", "block_size": 16},
    ),
}

RESTARTED = ("llama", "gemma3")
"""Families whose servers are restarted: one group of layers, and several."""


def write_model(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Writes the checkpoint of a family to `folder`, unless it is there, and returns `folder`."""
    if (folder / "tokenizer.json").exists():
        return folder
    import torch
    import transformers

    family = FAMILIES[name]
    fields = {**_COMMON, **family.overrides}
    config = getattr(transformers, family.config_class)(**fields)
    torch.manual_seed(seed)
    model = getattr(transformers, family.model_class)(config).eval()
    _randomize(model)
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _randomize(model: Any) -> None:
    """Draws all weights so large that attention is peaked and that each token depends on the whole prompt."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
            elif "embed" in name:
                weight.normal_(std=1.0)
            else:
                weight.normal_(std=1.6 * weight.shape[-1] ** -0.5)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(WordLevel({str(n): n for n in range(VOCAB_SIZE)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": str(_EOS), "unk_token": "0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
