"""What a worker tells the cluster about the model that its vLLM engine loaded: layout, fingerprint, vocabulary.

The fingerprint stands for what determines tokens, so it does not name the machine, the number of GPUs or the layout of
KV: the connector checks those where they matter.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from moonserve.protocol.kv_blocks import DTYPE_BYTES, KvLayout
from moonserve.vllm.kv.settings import model_identity

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_NAMES = {"float16": "bfloat16", "float32": "float32", "bfloat16": "bfloat16"}  # by size: the layout has no float16


def layout_of(config: VllmConfig) -> KvLayout:
    """Returns the shape of a block as the conductor counts it. It only serves to predict bytes: MLA and hybrid models
    hold less than this."""
    model = config.model_config
    cache_dtype = str(config.cache_config.cache_dtype)
    dtype = _dtype_name(model.dtype)
    head_dim = model.get_head_size()
    if cache_dtype.startswith("fp8") and head_dim % DTYPE_BYTES["float32"] == 0:
        dtype = "fp8"
    return KvLayout(
        num_layers=max(1, model.get_total_num_hidden_layers()),
        block_size=config.cache_config.block_size,
        num_kv_heads=max(1, model.get_total_num_kv_heads()),
        head_dim=head_dim,
        dtype=_NAMES.get(dtype, dtype),
    )


def fingerprint_of(config: VllmConfig) -> str:
    """Returns the identity of model, computation and block size. Reads samples of a local model's weights."""
    model, cache = config.model_config, config.cache_config
    identity = model_identity(model.model, model.revision, model.hf_config.to_dict())
    parts = (identity, _dtype_name(model.dtype), cache.cache_dtype, cache.block_size, model.quantization)
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
