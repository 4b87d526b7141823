"""Reads the configuration of any decoder, of an own family or of transformers. No torch."""

import hashlib
from pathlib import Path
from typing import Any

from moonserve.engine.model.config import (
    SUPPORTED_ARCHITECTURES,
    ModelConfig,
    eos_token_ids,
    is_own_family,
    load_model_config,
    stored_dtype,
)
from moonserve.engine.model.config.quantised_checkpoint import require_plain_weights
from moonserve.engine.model.config.rope import RopeConfig
from moonserve.engine.model.model_folder import JsonFields, read_json
from moonserve.protocol.errors import ConfigError

_ATTENTION = ("full_attention", "sliding_attention")


def read_config(path: Path) -> ModelConfig:
    """Returns the configuration of a model of an own family, or of another one that `AutoModelForCausalLM` knows.
    Raises ConfigError, which says what would work, if there is none, or if the model has other state than K and V of
    equal width, or latents, in every layer."""
    if not path.is_dir():
        return load_model_config(path)
    fields = JsonFields(read_json(path / "config.json"), source=str(path / "config.json"))
    if is_own_family(fields):
        return load_model_config(path)
    require_plain_weights(fields)
    config = _text_config(path, fields)
    try:
        return _described(config, path, fields)
    except ConfigError:
        raise
    except Exception as error:  # configurations have properties that raise
        raise _unsupported(fields, str(error)) from error


def _described(config: Any, path: Path, fields: JsonFields) -> ModelConfig:
    num_layers, num_heads = int(config.num_hidden_layers), int(config.num_attention_heads)
    hidden, vocab = int(config.hidden_size), int(config.vocab_size)
    positions = int(config.max_position_embeddings)
    kv_heads, head_dim = getattr(config, "num_key_value_heads", None), getattr(config, "head_dim", None)
    latent_rank = getattr(config, "kv_lora_rank", None)
    if latent_rank:
        kv_heads, head_dim = 1, (latent_rank + config.qk_rope_head_dim) // 2  # of even numbers
    return ModelConfig(
        architecture=", ".join(fields.strings("architectures") or (type(config).__name__,)),
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * hidden),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(kv_heads or num_heads),
        head_dim=int(head_dim or hidden // num_heads),
        rms_norm_eps=0.0,
        max_position_embeddings=positions,
        rope=RopeConfig(max_position_embeddings=positions, original_max_position_embeddings=positions),
        sliding_windows=_windows(config, fields, num_layers),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        initializer_range=float(getattr(config, "initializer_range", 0.02)),
        dtype=stored_dtype(fields),
        eos_token_ids=eos_token_ids(path, fields, vocab),
        latent_rank=latent_rank,
        transformers_config=hashlib.blake2b((path / "config.json").read_bytes(), digest_size=16).hexdigest(),
    )


def _text_config(path: Path, fields: JsonFields) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # unknown types, missing fields, code of the hub
        raise _unsupported(fields, next(iter(str(error).splitlines()), type(error).__name__)) from error
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, ())
    names = {known} if isinstance(known, str) else set(known)
    if names.isdisjoint(fields.strings("architectures") or ()) or config.is_encoder_decoder:
        raise _unsupported(fields, "it is no decoder of transformers")
    return config.get_text_config()


def _windows(config: Any, fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", None) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * num_layers
    if other := sorted(set(kinds) - set(_ATTENTION)):
        raise _unsupported(fields, f"it has layers of {', '.join(other)}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _unsupported(fields: JsonFields, why: str) -> ConfigError:
    names = ", ".join(fields.strings("architectures") or ()) or "none (the field `architectures` is missing)"
    return fields.error(
        f"unsupported architecture: {names}: {why}; supported are {', '.join(SUPPORTED_ARCHITECTURES)} and other "
        "decoders of transformers (docs/models.md); architectures that vLLM knows are served with --engine vllm"
    )
