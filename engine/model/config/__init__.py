"""Model configuration: reads a model folder's config.json into a `ModelConfig`. No torch.

Owns the list of supported architectures and the error messages about them. The forward pass never reads the JSON.
Weights are checked by `engine.model.weights`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from moonserve.engine.model.config.experts import (
    Experts,
    deepseek_experts,
    gpt_oss_experts,
    mixtral_experts,
    qwen_experts,
)
from moonserve.engine.model.config.latents import LatentHeads, latent_heads
from moonserve.engine.model.config.quantised_checkpoint import QuantisedCheckpoint, read_quantised_checkpoint
from moonserve.engine.model.config.rope import RopeConfig, read_rope
from moonserve.engine.model.model_folder import JsonFields, read_json
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import DTYPE_BYTES, KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Configuration of a Llama-type decoder: RMSNorm, rotary positions, grouped-query attention, gated SiLU MLP, or
    several as experts."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the MLP, or of each expert
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]  # per layer, in tokens; None = full attention
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each head's query and key (Qwen3)
    initializer_range: float
    dtype: str  # the checkpoint's, with float16 replaced by bfloat16
    eos_token_ids: tuple[int, ...]  # may be empty
    attention_sinks: bool = False  # True: each query head has a logit of attending to nothing (gpt-oss)
    experts: Experts | None = None
    quantised: QuantisedCheckpoint | None = None  # None: weights are plain
    # Digest of the config.json of a model that only transformers computes; empty for the own families.
    transformers_config: str = ""
    # Multi-head latent attention: K and V of a token are compressed to this many values and a rotated key. The pool has
    # the first half of these as the token's K and the second one as its V. None: the model has none.
    latent_rank: int | None = None
    latent_heads: LatentHeads | None = None  # how an own family attends to latents

    @property
    def has_own_kernels(self) -> bool:
        return not self.transformers_config

    @property
    def attention_weights(self) -> int:
        """Number of weights in the matrices of one layer's attention."""
        if self.latent_heads is not None:
            return self.latent_heads.num_weights(self.hidden_size, self.num_heads)
        return 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim

    def resolve_dtype(self, name: str) -> str:
        """Returns the compute dtype for a `--dtype` value; auto means the checkpoint's own. Raises ConfigError."""
        if name == "auto":
            return self.dtype
        if name not in DTYPE_BYTES:
            raise ConfigError(f"dtype {name!r} is not one of auto, {', '.join(DTYPE_BYTES)}")
        return name

    @property
    def kv_identity(self) -> str:
        """Everything that KV depends on in addition to the weights and their shapes; part of the fingerprint."""
        more = "".join(f"|{each}" for each in (self.experts, self.latent_heads) if each is not None)
        return f"{self.rope}|{self.sliding_windows}|{self.rms_norm_eps}|{self.transformers_config}{more}"

    def of_layers(self, layers: range) -> "ModelConfig":
        """Returns the configuration of a pipeline stage that has only these layers, renumbered from 0."""
        windows = self.sliding_windows[layers.start : layers.stop]
        experts = None if self.experts is None else self.experts.of_layers(layers)
        return replace(self, num_layers=len(layers), sliding_windows=windows, experts=experts)

    def kv_layout(self, block_size: int, dtype: str, kv_dtype: str = "auto") -> KvLayout:
        """Returns the layout of this model's KV cache. `dtype` is a `--dtype` value, `kv_dtype` a `--kv-cache-dtype`
        value: auto means the compute dtype, fp8 and int8 quantise. Raises ConfigError."""
        if block_size < 1:
            raise ConfigError(f"block size must be at least 1, not {block_size}")
        try:
            return KvLayout(
                num_layers=self.num_layers,
                block_size=block_size,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                dtype=self._kv_dtype(self.resolve_dtype(dtype), kv_dtype),
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def _kv_dtype(self, dtype: str, name: str) -> str:
        if name == "auto":
            return dtype
        if name in DTYPE_BYTES and name != dtype:
            raise ConfigError(f"KV in {name} with a model in {dtype}: KV that is not quantised has the model's dtype")
        return name


@dataclass(frozen=True, slots=True)
class _Family:
    """Differences of one architecture from Llama."""

    biases: tuple[bool | str, bool | str, bool | str]  # of qkv, o, mlp; a string names the field that decides
    sliding_windows: Callable[[JsonFields, int], tuple[int | None, ...]]
    qk_norm: bool = False
    experts: Callable[[JsonFields], Experts] | None = None
    inner_size: str = "intermediate_size"  # field of the MLP's or an expert's inner size
    attention_sinks: bool = False
    latents: Callable[[JsonFields], LatentHeads] | None = None
    # Defaults of transformers for fields that config.json lacks.
    default_bias: bool = False
    default_head_dim: int | None = None  # None = hidden_size / num_attention_heads
    default_kv_heads: int | None = None  # None = num_attention_heads
    default_positions: int = 2048


def _no_window(_fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    return (None,) * num_layers


def _window(fields: JsonFields) -> int | None:
    """Returns the sliding window: None if it is null, the default of transformers (4096) if it is absent."""
    return fields.optional_count("sliding_window") if fields.has("sliding_window") else 4096


def _mistral_windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    return (_window(fields),) * num_layers


def _qwen_windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    window = _window(fields)
    if window is None or not fields.flag("use_sliding_window", default=False):
        return (None,) * num_layers
    first = fields.count("max_window_layers", default=28, minimum=0)
    return _windows_by_layer(fields, window, [layer >= first for layer in range(num_layers)])


def _gpt_oss_windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    window = fields.optional_count("sliding_window") if fields.has("sliding_window") else 128
    return _windows_by_layer(fields, window, [layer % 2 == 0 for layer in range(num_layers)])


def _windows_by_layer(fields: JsonFields, window: int | None, default: Sequence[bool]) -> tuple[int | None, ...]:
    """Returns the window of the layers that have one by `layer_types`, or by default."""
    layer_types, num_layers = fields.strings("layer_types"), len(default)
    if layer_types is None:
        return tuple(window if has_window else None for has_window in default)
    if len(layer_types) != num_layers:
        raise fields.error(f"layer_types names {len(layer_types)} layers, num_hidden_layers says {num_layers}")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


_MISTRAL = _Family((False, False, False), _mistral_windows, default_kv_heads=8, default_positions=131_072)
_QWEN3 = _Family(
    ("attention_bias", "attention_bias", False),
    _qwen_windows,
    qk_norm=True,
    default_head_dim=128,
    default_kv_heads=32,
    default_positions=32_768,
)
_DEEPSEEK_V2 = _Family(
    (False, False, False),
    _no_window,
    experts=partial(deepseek_experts, has_corrections=False),
    inner_size="moe_intermediate_size",
    latents=latent_heads,
)

_FAMILIES = {
    "LlamaForCausalLM": _Family(("attention_bias", "attention_bias", "mlp_bias"), _no_window),
    "MistralForCausalLM": _MISTRAL,
    "MixtralForCausalLM": replace(
        _MISTRAL,
        sliding_windows=lambda fields, num_layers: (fields.optional_count("sliding_window"),) * num_layers,
        experts=mixtral_experts,
    ),
    "Qwen2ForCausalLM": _Family((True, False, False), _qwen_windows, default_kv_heads=32, default_positions=32_768),
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": replace(
        _QWEN3, experts=qwen_experts, inner_size="moe_intermediate_size", default_head_dim=None, default_kv_heads=4
    ),
    "GptOssForCausalLM": _Family(
        ("attention_bias", "attention_bias", True),
        _gpt_oss_windows,
        experts=gpt_oss_experts,
        attention_sinks=True,
        default_bias=True,
        default_head_dim=64,
        default_kv_heads=8,
        default_positions=131_072,
    ),
    "DeepseekV2ForCausalLM": _DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": replace(
        _DEEPSEEK_V2, experts=partial(deepseek_experts, has_corrections=True), default_positions=4096
    ),
}

SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)


def is_own_family(fields: JsonFields) -> bool:
    """True if this package computes the model itself. Layers that have a plain MLP among Qwen's mixtures, and biases of
    DeepSeek are transformers'."""
    families = [_FAMILIES[name] for name in fields.strings("architectures") or () if name in _FAMILIES]
    if not families or families[0].experts is None:
        return bool(families)
    if families[0].latents is not None:
        return not any(fields.flag(name, default=False) for name in ("attention_bias", "mlp_bias"))
    return fields.count("decoder_sparse_step", default=1) == 1 and not fields.token_ids("mlp_only_layers")


def load_model_config(path: Path) -> ModelConfig:
    """Reads config.json and generation_config.json of a model of an own family (`engine.model.transformers_config`:
    of any). Raises ConfigError that names the file and the field."""
    if not path.is_dir():
        raise ConfigError(f"model folder {path} does not exist or is not a folder")
    fields = JsonFields(read_json(path / "config.json"), source=str(path / "config.json"))
    architecture = _architecture(fields)
    family = _FAMILIES[architecture]
    num_layers = fields.count("num_hidden_layers")
    num_heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    latents = None if family.latents is None else family.latents(fields)
    head_dim = _head_dim(fields, family, hidden_size, num_heads) if latents is None else latents.pooled // 2
    vocab_size = fields.count("vocab_size")
    max_positions = fields.count("max_position_embeddings", default=family.default_positions)
    qkv_bias, o_bias, mlp_bias = (
        fields.flag(each, default=family.default_bias) if isinstance(each, str) else each for each in family.biases
    )
    _require_silu(fields)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.count(family.inner_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, family, num_heads) if latents is None else 1,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        max_position_embeddings=max_positions,
        rope=read_rope(fields, max_position_embeddings=max_positions),
        sliding_windows=family.sliding_windows(fields, num_layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=family.qk_norm,
        attention_sinks=family.attention_sinks,
        initializer_range=fields.number("initializer_range", default=0.02),
        dtype=stored_dtype(fields),
        eos_token_ids=eos_token_ids(path, fields, vocab_size),
        experts=None if family.experts is None else family.experts(fields),
        quantised=read_quantised_checkpoint(fields),
        latent_rank=None if latents is None else latents.rank,
        latent_heads=latents,
    )


def _architecture(fields: JsonFields) -> str:
    names = fields.strings("architectures") or ()
    for name in names:
        if name in _FAMILIES:
            return name
    found = ", ".join(names) or "none (the field `architectures` is missing)"
    raise fields.error(
        f"unsupported architecture: {found}; supported are {', '.join(SUPPORTED_ARCHITECTURES)}; those that vLLM knows "
        "are served with --engine vllm"
    )


def _head_dim(fields: JsonFields, family: _Family, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.optional_count("head_dim") or family.default_head_dim
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.error(
                f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
                "and head_dim is not given"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} must be even for rotary positions")
    return head_dim


def _num_kv_heads(fields: JsonFields, family: _Family, num_heads: int) -> int:
    """Returns the number of KV heads: the query heads' if it is null, the family's default if it is absent."""
    name = "num_key_value_heads"
    given = fields.optional_count(name) if fields.has(name) else family.default_kv_heads
    num_kv_heads = given or num_heads
    if num_heads % num_kv_heads:
        raise fields.error(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    return num_kv_heads


def _require_silu(fields: JsonFields) -> None:
    activation = fields.text("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        raise fields.error(f"hidden_act {activation!r} is not supported, only silu")


def stored_dtype(fields: JsonFields) -> str:
    """Returns the checkpoint's dtype. float16, which has no KV layout, is replaced by bfloat16."""
    name = fields.text("dtype", default=fields.text("torch_dtype", default="float32"))
    known = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}
    if name not in known:
        raise fields.error(f"dtype {name!r} is not supported, only {', '.join(known)}")
    return known[name]


def eos_token_ids(path: Path, fields: JsonFields, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids of both files, generation_config.json first: chat models often name their end-of-turn token only
    there. Ids outside the vocabulary are dropped: they cannot be sampled, and some files use -1 for "none"."""
    ids: list[int] = []
    generation = path / "generation_config.json"
    if generation.exists():
        ids += JsonFields(read_json(generation), source=str(generation)).token_ids("eos_token_id")
    ids += fields.token_ids("eos_token_id")
    return tuple(each for each in dict.fromkeys(ids) if 0 <= each < vocab_size)
