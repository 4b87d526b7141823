"""Models with random weights, created on the device, so that any size works without a file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from moonserve.engine.cuda.attention import TritonAttention
from moonserve.engine.cuda.graphs import with_graphs
from moonserve.engine.cuda.layers import TritonKernels
from moonserve.engine.engine import Engine
from moonserve.engine.kernels import Geometry
from moonserve.engine.kv_cache.tensors import TORCH_DTYPES, KvTensors
from moonserve.engine.model.batch import Slice
from moonserve.engine.model.config import ModelConfig, load_model_config
from moonserve.engine.model.forward_pass import Model
from moonserve.engine.model.weights import Weights
from moonserve.engine.model.weights.layer_weights import LayerWeights, MlpWeights, plain
from moonserve.protocol.request import RequestId, SamplingParams

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 16384,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "tie_word_embeddings": True,
    },
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
    },
}
"""A tiny Llama, and the published configurations of Llama 3.2 1B and Llama 3.1 8B."""

BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine, its parts, and the size from which its speed limits are computed."""

    engine: Engine  # with CUDA graphs on a GPU
    model: Model  # without graphs
    pool: KvTensors
    product_weights: int  # number of weights with which every token is multiplied

    def product_bytes(self) -> int:
        return self.product_weights * self.pool.keys[0].element_size()


def json_config(shape: str) -> dict[str, Any]:
    """Returns the content of the model's config.json."""
    return {**_LLAMA, **SHAPES[shape]}


def load(shape: str, dtype: str, num_blocks: int, device: torch.device) -> Loaded:
    with TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(json_config(shape)))
        config = load_model_config(path)
    return assemble(config, random_weights(config, TORCH_DTYPES[dtype], device), num_blocks, dtype)


def assemble(config: ModelConfig, weights: Weights, num_blocks: int, dtype: str) -> Loaded:
    """Builds an engine and keeps access to its pool and model."""
    device = weights.embedding.device
    pool = KvTensors(config.kv_layout(BLOCK_SIZE, dtype), num_blocks, None, device)
    geometry = Geometry(config.num_heads, config.num_kv_heads, config.head_dim)
    attention = TritonAttention(geometry, pool)
    model = Model(config, TritonKernels(config, weights, pool), attention)
    graphed = with_graphs(model, config, pool)
    engine = Engine(config, graphed, attention, pool, weights.digest)
    return Loaded(engine, model, pool, sum(plain(one).numel() for one in weights.projections))


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype) * config.initializer_range

    def norm(size: int) -> torch.Tensor:
        return torch.ones(size, device=device, dtype=dtype)

    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layers = [
        LayerWeights(
            input_norm=norm(hidden),
            qkv=matrix(q_rows + 2 * kv_rows, hidden),
            qkv_bias=None,
            qk_norm=None,
            o=matrix(hidden, q_rows),
            o_bias=None,
            post_norm=norm(hidden),
            sinks=None,
            router=None,
            router_bias=None,
            mlps=[
                MlpWeights(
                    gate_up=matrix(2 * inner, hidden), gate_up_bias=None, down=matrix(hidden, inner), down_bias=None
                )
            ],
        )
        for _ in range(config.num_layers)
    ]
    embedding = matrix(config.vocab_size, hidden)
    lm_head = embedding if config.tie_word_embeddings else matrix(config.vocab_size, hidden)
    return Weights(embedding=embedding, layers=layers, norm=norm(hidden), lm_head=lm_head, digest="random")


def one_slice(row: int, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> Slice:
    """Returns a slice that computes `tokens` from `start` on and samples one greedy token."""
    return Slice(
        request_id=RequestId(f"check-{row}"),
        token_ids=tokens,
        start=start,
        end=len(tokens),
        block_table=blocks,
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        num_prompt_tokens=len(tokens),
        samples=True,
    )
