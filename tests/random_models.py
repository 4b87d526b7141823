"""Tiny models with random weights, in the layout of a Hugging Face checkpoint.

`make_model("llama", path)` writes config, weights, and a byte-level tokenizer with a chat template: enough for a
gateway to serve it and for transformers to load it as the reference.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers.convert_slow_tokenizer import bytes_to_unicode

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
}

OTHERS: dict[str, tuple[Any, Any]] = {"olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM)}
"""Models that only the layers of transformers compute."""

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
BOS, EOS, IM_START, IM_END = range(256, VOCAB_SIZE)

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    # Large, so that attention and logits are peaked and greedy choices are not ties.
    "initializer_range": 0.2,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
_LATENT: dict[str, Any] = {
    **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 18, "v_head_dim": 12, "head_dim": 8},
    **{"num_key_value_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 48},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
}
"""DeepSeek: a layer with a plain MLP, then mixtures, with experts from two of four groups."""


def make_model(
    family: str, path: Path, *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any
) -> transformers.PreTrainedModel:
    """Writes a checkpoint to `path` and returns the transformers model from which it was saved, in float32.
    `overrides` are fields of the transformers configuration."""
    config_class, model_class = (FAMILIES | OTHERS)[family]
    latent = _LATENT if family.startswith("deepseek") else {}
    config = config_class(**{**_DEFAULTS, **latent, **overrides})
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model: transformers.PreTrainedModel = model_class(config).eval()
        for name, parameter in model.named_parameters():
            # The initial 0 and 1 of biases and norms would hide a loader that forgets them.
            if name.endswith("bias"):
                parameter.data.normal_(std=0.2)
            elif parameter.ndim == 1:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
    finally:
        torch.random.set_rng_state(state)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    write_tokenizer(path)
    return model


def write_tokenizer(path: Path) -> None:
    """Writes a tokenizer whose first 256 ids are the bytes and which merges nothing."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": _CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
