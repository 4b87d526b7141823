"""What is measured: models, dtypes, batches and contexts; and how many bytes a step cannot do without.

The 110M model is the one of the published comparison: a Llama with random weights. No torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ModelConfig, load_model_config

DEMO_FOLDER = Path(__file__).parent.parent.parent / "models" / "demo"
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
BATCHES = (1, 8, 32)
CONTEXTS = (512, 2048)
PROMPTS = (512, 2048)
BLOCK_SIZE = 32
CHUNK = 512
"""Prompt tokens per step: what a prefill worker takes."""

_SMALL: dict[str, Any] = {
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
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decode step, or where `prompt` is given, the prefill of one."""

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


def model_folder(name: str, temporary: Path) -> Path:
    """Of "demo", or of "110M", whose configuration is written there."""
    if name == "demo":
        return DEMO_FOLDER
    folder = temporary / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_SMALL))
    return folder


def step_bytes(folder: Path, dtype: str, shape: Shape) -> int:
    """Weights and KV that a decode step reads: everything but the embedding's other rows."""
    config = load_model_config(folder)
    return DTYPE_BYTES[dtype] * (_weights(config) + shape.batch * shape.context * _kv(config))


def _weights(config: ModelConfig) -> int:
    hidden, heads = config.hidden_size, config.num_heads + 2 * config.num_kv_heads
    attention = hidden * (heads + config.num_heads) * config.head_dim
    layer = attention + 3 * hidden * config.intermediate_size
    return config.num_layers * layer + config.vocab_size * hidden


def _kv(config: ModelConfig) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim
