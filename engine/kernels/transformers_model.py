"""Any decoder of transformers over the paged KV pool: its own layers, with its attention replaced by ours.

For models of no own family, and slower: each operation is dispatched by torch, and attention runs sequence by sequence.
A row's last bits may depend on the other rows of its step, unlike with the other kernels. Transformers calls the
function registered here with the queries, keys and values of each layer; it writes K and V to the pool and reads
earlier tokens from there. Values narrower than keys are padded to the pool's width. With multi-head latent attention,
the pool has the latents (`ModelConfig.latent_rank`).
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from moonserve.engine.kernels import Span, Step
from moonserve.engine.kernels.torch_attention import first_block
from moonserve.engine.kv_cache.tensors import TORCH_DTYPES, KvTensors
from moonserve.engine.model.config import ModelConfig
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import KvLayout
from moonserve.protocol.kv_blocks import fingerprint as make_fingerprint

log = logging.getLogger(__name__)

_NAME = "moonserve_paged"
_DUMMY_SEED = 0
_NAMES_SHOWN = 5
_VERIFIED_TOKENS = 48
_TOLERANCES, _QUANTISED_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}, 0.2
"""Largest relative difference of logits to those of the model's own attention, at the start."""


@dataclass(slots=True)
class _Pass:
    """A forward pass in progress."""

    model: "TransformersModel"
    step: Step
    on_layer: Callable[[int], None] | None


_current: ContextVar[_Pass] = ContextVar("pass")


class TransformersModel:
    """`ForwardPass` of a model of transformers, and the order that it needs (`StepOrder`)."""

    kernels_name = name = "transformers"
    reads_whole_blocks = False

    def __init__(self, model: Any, config: ModelConfig, pool: KvTensors, fingerprint: str) -> None:
        """Raises ConfigError if the model's attention does not fit the pool or gives other logits there."""
        self._model = model
        self.windows = config.sliding_windows
        self.pool = pool
        self.fingerprint = fingerprint
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._layers_seen: set[int] = set()
        self._rank = config.latent_rank
        for module in model.modules():
            if self._rank is not None and hasattr(module, "expand_kv"):
                module.expand_all = module.expand_kv
                module.expand_kv = partial(_expand_unless_paged, module.expand_kv)
        self._verify(config)

    def order(self, lengths: Sequence[tuple[int, int]]) -> list[int]:
        return list(range(len(lengths)))

    def forward(self, step: Step, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Implements `ForwardPass.forward`."""
        wanted = {} if step.rows is None or not self._selects_rows else {"logits_to_keep": step.rows}
        token = _current.set(_Pass(self, step, on_layer))
        try:
            output = self._model(
                input_ids=step.token_ids[None], position_ids=step.positions[None], use_cache=False, **wanted
            )
        finally:
            _current.reset(token)
        logits: torch.Tensor = output.logits[0].float()
        return logits if step.rows is None or self._selects_rows else logits[step.rows]

    def attend(
        self,
        module: Any,
        work: _Pass,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes attention of one layer: [heads, tokens, head_dim] each → [tokens, heads, width of a value]. Latents
        [1, tokens, latent_rank] and rotated keys come as keys and values."""
        layer, width = module.layer_idx, values.shape[-1]
        if self._rank is not None:
            kept = torch.cat((keys, values), -1).chunk(2, -1)
        else:
            kept = keys, F.pad(values, (0, keys.shape[-1] - width)) if width < keys.shape[-1] else values
        self.pool.write(layer, work.step.slots, kept[0].transpose(0, 1), kept[1].transpose(0, 1))
        self._layers_seen.add(layer)
        if work.on_layer is not None:
            work.on_layer(layer)
        parts, row = [], 0
        for span in work.step.spans:
            own = queries[:, row : row + span.end - span.start]
            row += span.end - span.start
            seen_keys, seen_values, mask = self._seen(layer, span)
            if self._rank is not None:
                latents, rotated = torch.cat((seen_keys, seen_values), -1).tensor_split((self._rank,), -1)
                parts.append(_attend_latents(module, own, latents, rotated, mask, scaling))
                continue
            parts.append(_attend(own, seen_keys, seen_values[..., :width], mask, scaling, softcap, sinks))
        return torch.cat(parts, 1).transpose(0, 1)

    def _seen(self, layer: int, span: Span) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns K and V [kv_heads, tokens, head_dim] that a span attends to, and its mask [queries, tokens]: True =
        visible."""
        window, size = self.windows[layer], self.pool.layout.block_size
        begin = first_block(span, window, size)
        blocks = torch.from_numpy(span.blocks[begin : -(-span.end // size)].copy())
        positions = torch.arange(begin * size, span.end)[None, :]
        own = torch.arange(span.start, span.end)[:, None]
        mask = positions <= own
        if window is not None:
            mask &= positions > own - window
        keys, values = (piece.flatten(0, 1)[: mask.shape[1]] for piece in self.pool.gather(layer, blocks))
        return keys.transpose(0, 1), values.transpose(0, 1), mask

    def _verify(self, config: ModelConfig) -> None:
        """Computes a short prompt with the model's own attention, and in two steps over the pool."""
        size = self.pool.layout.block_size
        length = min(_VERIFIED_TOKENS, self.pool.num_blocks * size, config.max_position_embeddings)
        tokens = torch.arange(length) * 7 % config.vocab_size
        blocks = np.arange(self.pool.layout.blocks_for(length))
        try:
            with torch.inference_mode():
                self._model.set_attn_implementation("eager")
                expected = self._model(input_ids=tokens[None], use_cache=False).logits[0, -1].float()
                self._model.set_attn_implementation(_NAME)
                for first, end in ((0, length // 2), (length // 2, length)):
                    positions = torch.arange(first, end)
                    step = Step(
                        token_ids=tokens[first:end],
                        positions=positions,
                        longest=end,
                        slots=positions,
                        spans=[Span(first, end, blocks, length)],
                        rows=None,
                    )
                    found = self.forward(step)[-1] if end > first else expected
                self.pool.clear(torch.arange(length))
        except Exception as error:  # whatever a model's code raises
            raise self._refusal(config, str(error)) from error
        difference = float((found - expected).norm() / expected.norm())
        bound = _QUANTISED_TOLERANCE if self.pool.layout.is_quantised else _TOLERANCES[self.pool.dtype]
        if self._layers_seen != set(range(config.num_layers)) or not difference <= bound:
            raise self._refusal(config, f"the logits differ by {difference:.1e}")

    @staticmethod
    def _refusal(config: ModelConfig, why: str) -> ConfigError:
        return ConfigError(
            f"transformers cannot compute {config.architecture} over paged KV ({why}): serve it with --engine vllm"
        )


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one sequence: queries [heads, queries, head_dim], K and V [kv_heads, tokens, …]. `sinks` [heads]:
    logits of a token without a value."""
    group = queries.shape[0] // keys.shape[0]
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=mask, scale=scaling, enable_gqa=group > 1
        )[0]
    keys, values = (each.repeat_interleave(group, 0) for each in (keys, values))
    scores = torch.matmul(queries, keys.transpose(1, 2)) * (queries.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights[..., : keys.shape[1]], values)


def _expand_unless_paged(expand: Callable[..., Any], latents: torch.Tensor, rotated: torch.Tensor) -> Any:
    """Takes the place of `expand_kv` of a module with latent attention: `_paged` gets what it compressed."""
    return expand(latents, rotated) if _current.get(None) is None else (latents, rotated)


def _attend_latents(
    module: Any,
    queries: torch.Tensor,
    latents: torch.Tensor,
    rotated: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of one sequence: queries [heads, queries, head_dim], latents [1, tokens, rank] and rotated keys. Few
    queries are projected to the latents' space instead of the latents to theirs (section 2.1 of the DeepSeek-V2 paper,
    arXiv 2405.04434), whichever takes fewer multiplications."""
    heads, count, head_dim = queries.shape
    nope, rank = head_dim - rotated.shape[-1], latents.shape[-1]
    up = module.kv_b_proj.weight.view(heads, -1, rank)  # [heads, nope + width of a value, rank]
    width = up.shape[1] - nope
    more_per_query = 2 * rank + rotated.shape[-1] - head_dim - width
    if count * more_per_query > rank * up.shape[1]:
        keys, values = module.expand_all(latents[None], rotated[None])
        return F.scaled_dot_product_attention(queries[None], keys, values, attn_mask=mask, scale=scaling)[0]
    projected: torch.Tensor = torch.cat((queries[..., :nope] @ up[:, :nope], queries[..., nope:]), -1)
    keys = torch.cat((latents, rotated), -1)[0]
    scores = (projected.flatten(0, 1) @ keys.T).view(heads, count, -1) * (
        head_dim**-0.5 if scaling is None else scaling
    )
    weights = scores.masked_fill_(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(latents.dtype)
    attended: torch.Tensor = (weights.flatten(0, 1) @ latents[0]).view(heads, count, rank) @ up[:, nope:].mT
    return attended


def _paged(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: object, **more: Any
) -> tuple[torch.Tensor, None]:
    """Attention function of transformers: [1, heads, tokens, head_dim] each → [1, tokens, heads, head_dim]."""
    work, layer = _current.get(), module.layer_idx
    if not getattr(module, "is_causal", True):
        raise ValueError("its attention is not causal")
    if more.get("sliding_window") != work.model.windows[layer] and "sliding_window" in more:
        raise ValueError(f"layer {layer} has a window of {more['sliding_window']}")
    output = work.model.attend(
        module,
        work,
        query[0],
        key[0],
        value[0],
        scaling=more.get("scaling"),
        softcap=more.get("softcap"),
        sinks=more.get("s_aux"),
    )
    return output[None].contiguous(), None


AttentionInterface.register(_NAME, _paged)
AttentionMaskInterface.register(_NAME, lambda *_args, **_kwargs: None)


def load_over_transformers(
    path: Path,
    config: ModelConfig,
    layout: KvLayout,
    num_blocks: int,
    memory: memoryview | None,
    dtype: str | None,
    load_format: str,
) -> TransformersModel:
    """Loads a model, with its pool in `memory`; see `Engine.load`. Raises ConfigError."""
    log.warning(
        "transformers computes %s: slower than the own families; --engine vllm may be faster", config.architecture
    )
    pool = KvTensors(layout, num_blocks, memory, dtype=dtype or layout.dtype)
    options = {"dtype": TORCH_DTYPES[pool.dtype], "attn_implementation": _NAME}
    auto: Any = AutoModelForCausalLM
    try:
        if load_format == "dummy":
            torch.manual_seed(_DUMMY_SEED)
            model = auto.from_config(AutoConfig.from_pretrained(path), **options)
        else:
            model, info = auto.from_pretrained(path, output_loading_info=True, **options)
            if wrong := sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"]))):
                raise ValueError(f"weights are missing or misshapen: {', '.join(wrong[:_NAMES_SHOWN])}")
    except Exception as error:  # its loaders raise errors of many kinds
        raise ConfigError(
            f"transformers cannot load {config.architecture} with paged KV: {type(error).__name__}: {error}; "
            "architectures that vLLM knows are served with --engine vllm"
        ) from error
    return TransformersModel(model.eval(), config, pool, make_fingerprint(_digest(path, config), layout, pool.dtype))


def _digest(path: Path, config: ModelConfig) -> str:
    """Hashes the checkpoint's files and the configuration that KV depends on."""
    digest = xxhash.xxh3_128(config.kv_identity.encode())
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as opened:
            while part := opened.read(1 << 24):
                digest.update(part)
    return digest.hexdigest()
