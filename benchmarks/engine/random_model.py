"""Writes a model with random weights: `python -m benchmarks.engine.random_model FOLDER 110M`.

The weights are the same every time. It is a separate program so that the measuring process need not import torch.
"""

from __future__ import annotations

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
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
    }
    experts = config.get("num_experts", 0)
    inner = config["moe_intermediate_size" if experts else "intermediate_size"]
    for mlp in [f"mlp.experts.{number}" for number in range(experts)] or ["mlp"]:
        layer |= {
            f"{mlp}.gate_proj": (inner, hidden),
            f"{mlp}.up_proj": (inner, hidden),
            f"{mlp}.down_proj": (hidden, inner),
        }
    if experts:
        norm = (config["head_dim"],)
        layer |= {"mlp.gate": (experts, hidden), "self_attn.q_norm": norm, "self_attn.k_norm": norm}
    layers = {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    ends: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        ends["lm_head.weight"] = (vocab, hidden)
    return {**ends, **layers}


if __name__ == "__main__":
    write(Path(sys.argv[1]), RANDOM[sys.argv[2]])
