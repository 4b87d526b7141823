"""Reads the rotary positions of a config.json: `rope_theta` with `rope_scaling`, or the newer `rope_parameters`.

Owns the list of supported types and the error messages about them. No torch.
"""

import math
from dataclasses import dataclass

from moonserve.engine.model.model_folder import JsonFields

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Configuration of the rotary position embedding; `engine.kernels.rope` computes it. Fields that a type does not
    use keep their defaults."""

    rope_type: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    max_position_embeddings: int  # dynamic: length at which scaling begins
    original_max_position_embeddings: int  # llama3, yarn: the context of pre-training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # multiplies cos and sin; yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions


def read_rope(fields: JsonFields, *, max_position_embeddings: int) -> RopeConfig:
    """Returns the rotary configuration of a config.json. Raises ConfigError for unsupported types, missing factors."""
    given = _given(fields)
    theta = fields.number("rope_theta", default=_DEFAULT_THETA)
    if given is None:
        return RopeConfig(
            theta=theta,
            max_position_embeddings=max_position_embeddings,
            original_max_position_embeddings=max_position_embeddings,
        )
    rope_type = _rope_type(given)
    _require_whole_heads(given, fields, rope_type)
    # Like in transformers, the field outside of the rope settings has precedence.
    name = "original_max_position_embeddings"
    original = fields.optional_count(name) or given.count(name, default=max_position_embeddings)
    factor = _factor(given, rope_type, max_position_embeddings / original)
    return RopeConfig(
        rope_type=rope_type,
        theta=given.number("rope_theta", default=theta),
        factor=factor,
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=original,
        low_freq_factor=_llama3_factor(given, rope_type, "low_freq_factor", 1.0),
        high_freq_factor=_llama3_factor(given, rope_type, "high_freq_factor", 4.0),
        beta_fast=given.optional_number("beta_fast") or 32.0,
        beta_slow=given.optional_number("beta_slow") or 1.0,
        attention_factor=_attention_factor(given, rope_type, factor),
        truncate=given.flag("truncate", default=True),
    )


def score_factor(fields: JsonFields) -> float:
    """Returns the factor of DeepSeek's attention scores for long contexts: 1 unless `mscale_all_dim` is given."""
    given = _given(fields)
    if given is None or _rope_type(given) == "default":
        return 1.0
    return _mscale(given.number("factor", default=1.0), given.number("mscale_all_dim", default=0.0)) ** 2


def _given(fields: JsonFields) -> JsonFields | None:
    """Returns the rope settings, from the older form unless it is empty. Raises ConfigError for settings per layer."""
    for name in ("rope_scaling", "rope_parameters"):
        given = fields.nested(name)
        if given is not None and not given.is_empty:
            per_layer = given.objects()
            if per_layer:
                raise given.error(f"a separate rope for each kind of layer ({', '.join(per_layer)}) is not supported")
            return given
    return None


def _require_whole_heads(given: JsonFields, fields: JsonFields, rope_type: str) -> None:
    """Raises ConfigError for a partial rotary factor, which only the default rope ignores (like transformers)."""
    beside = fields.number("partial_rotary_factor", default=1.0)
    part = given.number("partial_rotary_factor", default=beside)
    if part != 1.0 and rope_type != "default":
        raise given.error("partial_rotary_factor is not supported")


def _rope_type(given: JsonFields) -> str:
    rope_type = given.text("rope_type", default=given.text("type", default="default"))
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise given.error(f"rope type {rope_type!r} is not supported, only {', '.join(SUPPORTED_ROPE_TYPES)}")
    return rope_type


def _factor(given: JsonFields, rope_type: str, implied: float) -> float:
    if rope_type == "default":
        return 1.0
    factor = given.number("factor", default=implied if rope_type == "yarn" else None)
    if factor < 1.0:
        raise given.error(f"factor must be at least 1, not {factor}")
    return factor


def _llama3_factor(given: JsonFields, rope_type: str, name: str, unused: float) -> float:
    return given.number(name, default=None if rope_type == "llama3" else unused)


def _attention_factor(given: JsonFields, rope_type: str, factor: float) -> float:
    """Returns YaRN's temperature (section 3.4 of its paper), or DeepSeek's form of it with two mscale fields."""
    if rope_type != "yarn":
        return 1.0
    explicit = given.optional_number("attention_factor")
    if explicit is not None:
        return explicit
    mscale, mscale_all_dim = (given.optional_number("mscale"), given.optional_number("mscale_all_dim"))
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
