"""Converts a Llama to a GGUF file for llama.cpp, without a vocabulary, because only token ids are exchanged.

llama.cpp applies rotary positions to neighbouring elements, Hugging Face to the two halves of a head. So the rows of
the query and key weights are permuted (`permute` in llama.cpp's convert_hf_to_gguf.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from safetensors.torch import load_file

KINDS = {"bf16": Kind.BF16, "f16": Kind.F16, "f32": Kind.F32}
Floats = npt.NDArray[np.float32]

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(folder: Path, path: Path, kind: str) -> None:
    """Writes the model to `path`. Norms stay in float32, as llama.cpp requires."""
    config = json.loads((folder / "config.json").read_text())
    unfinished = path.with_suffix(".unfinished")
    writer = GGUFWriter(unfinished, "llama")
    _describe(writer, config)
    for name, weight in _weights(folder, config):
        wanted = KINDS[kind] if weight.ndim > 1 else Kind.F32
        data = gguf.quants.quantize(weight, wanted)
        writer.add_tensor(name, data, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(unfinished, path)


def _describe(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _weights(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, Floats]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for stored, tensor in load_file(folder / "model.safetensors").items():
        weight: Floats = tensor.float().numpy()
        name = stored.removesuffix(".weight")
        if not name.startswith("model.layers."):
            yield f"{_NAMES[name]}.weight", weight
            continue
        layer, own = name.removeprefix("model.layers.").split(".", 1)
        kind = _NAMES[own]
        if kind in heads:
            weight = _interleave(weight, heads[kind])
        yield f"blk.{layer}.{kind}.weight", weight


def _interleave(weight: Floats, heads: int) -> Floats:
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
