"""Errors of quantised KV and quantised weights, by the demo model on files of this repository."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from benchmarks.engine.shapes import DEMO_FOLDER
from benchmarks.harness.measure import report_progress, table
from moonserve.engine.kernels import Geometry, Kernels, Span, Step
from moonserve.engine.kernels.native_layers import NativeKernels
from moonserve.engine.kernels.torch_attention import TorchPagedAttention
from moonserve.engine.kernels.torch_layers import TorchKernels
from moonserve.engine.kv_cache.tensors import QUANTISATIONS, TORCH_DTYPES, KvTensors, Quantisation
from moonserve.engine.model.config import load_model_config
from moonserve.engine.model.forward_pass import Model
from moonserve.engine.model.weights import load_weights
from moonserve.engine.model.weights.layer_weights import QUANTISED_FORMATS
from moonserve.protocol.kv_blocks import QUANTISED_DTYPES, KvLayout
from moonserve.protocol.process.machine import cache_folder

# Float32 pools that simulate quantised pools, with one scale per token and head, per token, or per block and head.
#
# `errors` compares them; workers have scales per token and head (`engine.kv_cache.tensors`). A scale per block grows
# as tokens arrive: earlier tokens are then quantised again from their rounded values, as a worker would have to do.

GRANULARITIES = ("token, head", "token", "block, head")
_LEAST = 1e-30


class FakeQuantPool(KvTensors):
    """Pool that rounds values as it stores them. For torch kernels and attention only: its tensors are floats."""

    def __init__(self, layout: KvLayout, num_blocks: int, kept: str, granularity: str) -> None:
        super().__init__(layout, num_blocks)
        self.layout = replace(layout, dtype=kept)  # so attention also reads a chunk's own K and V from the pool
        self._rounding = QUANTISATIONS[kept]
        self._granularity = granularity
        shape = (num_blocks, layout.num_kv_heads)
        self._highest = [torch.zeros(shape) for _ in range(2 * layout.num_layers)]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        for part, (piece, heads) in enumerate(((self.keys, keys), (self.values, values))):
            if self._granularity == "block, head":
                self._write_blocks(piece[layer], self._highest[2 * layer + part], slots, heads)
                continue
            shared = (-1,) if self._granularity == "token, head" else (-2, -1)
            highest = heads.abs().amax(shared, keepdim=True)
            piece[layer].flatten(0, 1)[slots] = rounded(heads, highest, self._rounding)

    def _write_blocks(
        self, piece: torch.Tensor, highest: torch.Tensor, slots: torch.Tensor, heads: torch.Tensor
    ) -> None:
        """Uses a scale per block and head. `highest` [blocks, kv_heads] grows; a block's first token resets it."""
        size = self.layout.block_size
        blocks = slots // size
        begun = blocks[slots % size == 0]
        highest[begun], piece[begun] = 0.0, 0.0
        before = highest.clone()
        magnitudes = heads.abs().amax(-1)
        highest.scatter_reduce_(0, blocks[:, None].expand_as(magnitudes), magnitudes, "amax")
        grown = torch.nonzero((highest > before).any(-1)).flatten()
        piece[grown] = rounded(piece[grown], highest[grown][:, None, :, None], self._rounding)
        piece.flatten(0, 1)[slots] = rounded(heads, highest[blocks][..., None], self._rounding)


def rounded(numbers: torch.Tensor, highest: torch.Tensor, code: Quantisation) -> torch.Tensor:
    """Quantises `numbers`, with `highest` mapped to the highest code, and returns them as floats."""
    scales = highest.clamp_min(_LEAST) / code.highest
    return code.round(numbers / scales).to(code.dtype).float() * scales


REPOSITORY = Path(__file__).parents[3]
TEXTS = (
    "engine/model/config/__init__.py",
    "engine/model/sampler.py",
    "protocol/rpc/wire.py",
    "protocol/membership/heartbeats.py",
    "transfer/memory/write_windows.py",
    "gateway/text/detokenizer.py",
    "conductor/prediction/instance_table.py",
    "kvstore/state/catalog.py",
    "conductor/role_switching.py",
    "decode_worker/decisions/admission_and_preemption.py",
    "engine/model/weights/__init__.py",
    "kvstore/state/state.py",
    "prefill_worker/state.py",
    "protocol/rpc/grpc_transport.py",
    "traces/replay.py",
    "transfer/memory/scatter.py",
)
PROMPT, ANSWER = 256, 256
BLOCK_SIZES = (16, 32, 128, 512)


# -- error


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to store K and V, and weights. `kept`: quantised dtype of KV; None = stored in `dtype`, as computed."""

    dtype: str
    kept: str | None = None
    granularity: str = ""
    block_size: int = 32
    quantise: str = "auto"  # a `--quantize` value
    is_native: bool = False  # weights stay integers

    @property
    def label(self) -> tuple[str, str, str]:
        if self.quantise != "auto":
            return f"{self.dtype}, weights {self.quantise}", "–", "any"
        size = str(self.block_size) if self.granularity == "block, head" else "any"
        return self.kept or self.dtype, self.granularity or "–", size


class Reader:
    """A model with its own pool; all sequences advance together."""

    def __init__(self, variant: Variant, num_texts: int) -> None:
        config = load_model_config(DEMO_FOLDER)
        weights = load_weights(
            DEMO_FOLDER,
            config,
            TORCH_DTYPES[variant.dtype],
            quantise=variant.quantise,
            keeps_integers=variant.is_native,
        )
        layout = config.kv_layout(variant.block_size, variant.dtype)
        self._size = variant.block_size
        self._per_text = layout.blocks_for(PROMPT + ANSWER)
        num_blocks = num_texts * self._per_text
        if variant.kept is None:
            pool = KvTensors(layout, num_blocks)
        else:
            pool = FakeQuantPool(layout, num_blocks, variant.kept, variant.granularity)
        geometry = Geometry(config.num_heads, config.num_kv_heads, config.head_dim)
        kernels: Kernels
        if variant.is_native:
            kernels = NativeKernels(config, weights, pool, 1, cache_folder(os.environ, Path.home()))
        else:
            kernels = TorchKernels(config, weights, pool)
        self._model = Model(config, kernels, TorchPagedAttention(geometry, pool))

    def read(self, texts: torch.Tensor, start: int) -> torch.Tensor:
        """Computes tokens [texts, tokens] at positions from `start` on. Returns logits [texts, tokens, vocabulary]."""
        count, length = texts.shape
        own = torch.arange(start, start + length)
        first = torch.arange(count)[:, None] * self._per_text
        slots = (first + own // self._size) * self._size + own % self._size
        step = Step(
            token_ids=texts.flatten(),
            positions=own.repeat(count),
            longest=start + length,
            slots=slots.flatten(),
            spans=[
                Span(start, start + length, np.arange(row, row + self._per_text), PROMPT)
                for row in first.flatten().tolist()
            ],
            rows=None,
        )
        return self._model.forward(step).view(count, length, -1)


def logits_along(variant: Variant, texts: torch.Tensor) -> torch.Tensor:
    """Returns the logits after each token of the texts: [texts, PROMPT + ANSWER, vocabulary]."""
    reader = Reader(variant, len(texts))
    prompts = [reader.read(texts[:, :PROMPT], 0)]
    steps = [reader.read(texts[:, at : at + 1], at) for at in range(PROMPT, PROMPT + ANSWER)]
    return torch.cat(prompts + steps, 1)


def continued(variant: Variant, texts: torch.Tensor) -> torch.Tensor:
    """Returns the greedy continuations of the prompts: [texts, ANSWER]."""
    reader = Reader(variant, len(texts))
    said = [reader.read(texts[:, :PROMPT], 0)[:, -1:].argmax(-1)]
    for at in range(PROMPT, PROMPT + ANSWER - 1):
        said.append(reader.read(said[-1], at).argmax(-1))
    return torch.cat(said, 1)


def variants() -> Iterator[Variant]:
    yield Variant("bfloat16")
    yield from (Variant("float32", quantise=format) for format in QUANTISED_FORMATS)
    for kept in QUANTISED_DTYPES[::-1]:
        for granularity in GRANULARITIES:
            for size in BLOCK_SIZES if granularity == "block, head" else (32,):
                yield Variant("float32", kept, granularity, size)


def errors(texts: torch.Tensor) -> list[dict[str, Any]]:
    """Returns one row of figures per variant."""
    plain = Variant("float32")
    expected, said = logits_along(plain, texts), continued(plain, texts)
    rows = [_row(plain, expected, said, expected, said, texts)]
    for variant in variants():
        report_progress(" · ".join(variant.label))
        found = logits_along(variant, texts), continued(variant, texts)
        rows.append(_row(variant, *found, expected, said, texts))
    return rows


def _row(
    variant: Variant,
    found: torch.Tensor,
    answers: torch.Tensor,
    expected: torch.Tensor,
    said: torch.Tensor,
    texts: torch.Tensor,
) -> dict[str, Any]:
    difference = (found - expected).abs()
    same = answers == said
    return {
        "kv": variant.label,
        "mean": float(difference.mean()),
        "max": float(difference.max()),
        "perplexity": _perplexity(found, texts),
        "same_choice": float((found.argmax(-1) == expected.argmax(-1)).float().mean()),
        "same_answer": float(same.float().mean()),
        "before_other": float(same.long().cumprod(1).sum(1).float().mean()),
    }


def product_errors(texts: torch.Tensor) -> list[dict[str, Any]]:
    """Returns one row of figures per format of weights, over every token of the texts."""

    def logits(**options: Any) -> torch.Tensor:
        return Reader(Variant("float32", **options), len(texts)).read(texts, 0).flatten(0, 1)

    plain, rows = logits(), []
    for name in QUANTISED_FORMATS:
        report_progress(name)
        rounded, found = logits(quantise=name), logits(quantise=name, is_native=True)
        of_format, of_products = (rounded - plain).abs(), (found - rounded).abs()
        same = found.argmax(-1) == rounded.argmax(-1)
        best = rounded.topk(2).values
        rows.append(
            {
                "weights": name,
                "positions": len(same),
                "format_mean": float(of_format.mean()),
                "format_max": float(of_format.max()),
                "products_mean": float(of_products.mean()),
                "products_max": float(of_products.max()),
                "same": float(same.float().mean()),
                "same_where_clear": float(same[best[:, 0] - best[:, 1] > of_format.mean()].float().mean()),
            }
        )
    return rows


def _perplexity(logits: torch.Tensor, texts: torch.Tensor) -> float:
    loss = F.cross_entropy(logits[:, PROMPT - 1 : -1].flatten(0, 1), texts[:, PROMPT:].flatten())
    return float(loss.exp())


def read_texts(names: Iterable[str] = TEXTS) -> torch.Tensor:
    """Returns the token ids of all texts that are long enough: [texts, PROMPT + ANSWER]."""
    tokenizer = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    contents = ((REPOSITORY / name).read_text(encoding="utf-8") for name in names)
    tokens = (tokenizer.encode(content).ids[: PROMPT + ANSWER] for content in contents)
    return torch.tensor([ids for ids in tokens if len(ids) == PROMPT + ANSWER])


def many_texts() -> torch.Tensor:
    """Returns 24 texts, for 12,288 positions."""
    files = sorted(REPOSITORY.glob("engine/*/*.py")) + sorted(REPOSITORY.glob("kvstore/*/*.py"))
    return read_texts(map(str, files))[:24]


# -- tables


def error_table(rows: Sequence[dict[str, Any]]) -> str:
    headers = (
        *("KV", "a scale per", "block size", "mean error", "max error", "perplexity"),
        *("same choice", "same answer", "tokens before another"),
    )
    cells = [
        [
            *row["kv"],
            f"{row['mean']:.4f}",
            f"{row['max']:.3f}",
            f"{row['perplexity']:.4f}",
            f"{100 * row['same_choice']:.2f} %",
            f"{100 * row['same_answer']:.1f} %",
            f"{row['before_other']:.0f}",
        ]
        for row in rows
    ]
    return table(headers, cells)


def product_table(rows: Sequence[dict[str, Any]]) -> str:
    headers = ["weights", "positions", "format: mean error", "max", "products: mean error", "max", "same choice"]
    cells = [
        [
            row["weights"],
            f"{row['positions']:,}",
            *(f"{row[name]:.5f}" for name in ("format_mean", "format_max", "products_mean", "products_max")),
            *(f"{100 * row[name]:.3f} %" for name in ("same", "same_where_clear")),
        ]
        for row in rows
    ]
    return table([*headers, "where the best is clear"], cells)
