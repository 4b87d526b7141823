"""What a worker tells the cluster about the model that its vLLM engine loaded: layout, fingerprint, vocabulary.

The fingerprint stands for what determines tokens, so it does not name the machine, the number of GPUs or the layout of
KV: the connector checks those where they matter.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moonserve.protocol.kv_blocks import DTYPE_BYTES, KvLayout
from moonserve.vllm.kv.settings import model_identity

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_NAMES = {"float16": "bfloat16", "float32": "float32", "bfloat16": "bfloat16"}  # by size: the layout has no float16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the cluster knows of an engine."""

    fingerprint: str  # of model, computation and block size
    layout: KvLayout
    num_blocks: int  # that requests can hold
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int = 0  # 0 = not known

    @property
    def block_size(self) -> int:
        return self.layout.block_size


def facts_of(config: VllmConfig) -> EngineFacts:
    """Returns the facts of a started engine. Reads samples of a local model's weights."""
    model, cache = config.model_config, config.cache_config
    identity = model_identity(model.model, model.revision, model.hf_config.to_dict())
    return EngineFacts(
        fingerprint=fingerprint(
            identity, _dtype_name(model.dtype), cache.cache_dtype, cache.block_size, model.quantization
        ),
        layout=layout(
            num_layers=model.get_total_num_hidden_layers(),
            block_size=cache.block_size,
            num_kv_heads=model.get_total_num_kv_heads(),
            head_dim=model.get_head_size(),
            dtype=_dtype_name(model.dtype),
            cache_dtype=str(cache.cache_dtype),
        ),
        num_blocks=max(1, (cache.num_gpu_blocks or 0) - 1),  # vLLM keeps one for itself
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
    )


def layout(
    *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str, cache_dtype: str
) -> KvLayout:
    """Returns the shape of a block as the conductor counts it. It only serves to predict bytes: MLA and hybrid models
    hold less than this."""
    if cache_dtype.startswith("fp8") and head_dim % DTYPE_BYTES["float32"] == 0:
        dtype = "fp8"
    return KvLayout(
        num_layers=max(1, num_layers),
        block_size=block_size,
        num_kv_heads=max(1, num_kv_heads),
        head_dim=head_dim,
        dtype=_NAMES.get(dtype, dtype),
    )


def fingerprint(*parts: object) -> str:
    """Returns the identity of everything that determines tokens."""
    return hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=16).hexdigest()


def eos_token_ids(model: ModelConfig) -> tuple[int, ...]:
    """Returns the tokens with which the model ends an answer."""
    found: dict[int, None] = {}
    sources: list[Any] = [model.hf_text_config.eos_token_id, model.try_get_generation_config().get("eos_token_id")]
    for source in sources:
        if source is not None:
            found |= dict.fromkeys([source] if isinstance(source, int) else source)
    return tuple(found)


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
