"""Writes a model with random weights: `python -m benchmarks.engine.random_model FOLDER 110M`.

The weights are the same every time. It is a separate program so that the measuring process need not import torch.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.engine.shapes import RANDOM, SMALL

_DEVIATION = 0.02  # as transformers initializes a Llama


def write(folder: Path, config: dict[str, Any] = SMALL) -> None:
    """Writes the model. config.json is written last, so that its presence means a complete model."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weights = {name: _weight(shape, generator).to(torch.bfloat16) for name, shape in _shapes(config).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    unfinished = folder / "config.unfinished"
    unfinished.write_text(json.dumps(config, indent=2))
    os.replace(unfinished, folder / "config.json")


def _weight(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape)
    return torch.empty(shape).normal_(std=_DEVIATION, generator=generator)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    layers = {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(config["num_hidden_layers"])
        for name, shape in (_attention(config) | _mlps(config, number)).items()
    }
    ends: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        ends["lm_head.weight"] = (vocab, hidden)
    return {**ends, **layers}


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config.get("kv_lora_rank")
    norms = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    if rank is not None:
        plain, rotary, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
        return norms | {
            "self_attn.q_proj": (heads * (plain + rotary), hidden),
            "self_attn.kv_a_proj_with_mqa": (rank + rotary, hidden),
            "self_attn.kv_a_layernorm": (rank,),
            "self_attn.kv_b_proj": (heads * (plain + value), rank),
            "self_attn.o_proj": (hidden, heads * value),
        }
    queries, keys = heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    norm = (config["head_dim"],)
    head_norms = {"self_attn.q_norm": norm, "self_attn.k_norm": norm} if config.get("num_experts") else {}
    return {
        **norms,
        **head_norms,
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
    }


def _mlps(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layer's MLP, or of its experts and router."""
    hidden, experts = config["hidden_size"], config.get("num_experts") or config.get("n_routed_experts", 0)
    inner = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    sizes = {f"mlp.experts.{number}": inner for number in range(experts)}
    if layer < config.get("first_k_dense_replace", 0) or not experts:
        sizes, experts = {"mlp": config["intermediate_size"]}, 0
    elif "n_shared_experts" in config:
        sizes["mlp.shared_experts"] = inner * config["n_shared_experts"]
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate": (experts, hidden)} if experts else {}
    for mlp, size in sizes.items():
        shapes |= {f"{mlp}.gate_proj": (size, hidden), f"{mlp}.up_proj": (size, hidden)}
        shapes[f"{mlp}.down_proj"] = (hidden, size)
    return shapes


if __name__ == "__main__":
    write(Path(sys.argv[1]), RANDOM[sys.argv[2]])
