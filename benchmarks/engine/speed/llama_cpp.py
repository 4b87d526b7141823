"""llama.cpp as a contestant, through the C interface of llama-cpp-python.

Several variants are tried: 16-bit weights as bfloat16 and as float16, or weights in Q8_0 or Q4_0, each with and without
flash attention. Each shape is measured with the variant that was fastest during its preparation. The KV of one sequence
is computed and copied for the other sequences of a batch, each into its own memory.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as api  # type: ignore[import-not-found]
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from safetensors.torch import load_file

from benchmarks.engine.shapes import BATCHES, CONTEXTS, Shape, prompt_tokens
from benchmarks.engine.speed.contestant import (
    LLAMA_CPP,
    LLAMA_CPP_4,
    LLAMA_CPP_8,
    ContestantConfig,
    StepTimer,
    StepTimes,
    scratch_file,
)

# The model as a GGUF file, without a vocabulary, because only token ids are exchanged. llama.cpp applies rotary
# positions to neighbouring elements, Hugging Face to the two halves of a head. So the rows of the query and key weights
# are permuted (`permute` in llama.cpp's convert_hf_to_gguf.py), but not those of Qwen, whose halves it knows. A layer's
# experts are one tensor.

KINDS = {"bf16": Kind.BF16, "f16": Kind.F16, "f32": Kind.F32, "q8_0": Kind.Q8_0, "q4_0": Kind.Q4_0}
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
    "mlp.gate": "ffn_gate_inp",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_ARCHITECTURES = {"llama": "llama", "qwen3_moe": "qwen3moe"}


def _write_gguf(folder: Path, path: Path, kind: str) -> None:
    """Writes the model to `path`. Norms stay in float32, as llama.cpp requires. Embedding and head of a model in 4 bits
    have 8, like ours; llama.cpp's own tool gives the head 6."""
    config = json.loads((folder / "config.json").read_text())
    unfinished = path.with_suffix(".unfinished")
    writer = GGUFWriter(unfinished, _ARCHITECTURES[config["model_type"]])
    _describe(writer, config)
    for name, weight in _gguf_weights(folder, config):
        is_end = name.startswith(("token_embd", "output.")) and kind == "q4_0"
        wanted = Kind.F32 if weight.ndim == 1 else Kind.Q8_0 if is_end else KINDS[kind]
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
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _gguf_weights(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, Floats]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if config["model_type"] != "llama":
        heads = {}
    experts: dict[str, dict[int, Floats]] = {}
    for stored, tensor in load_file(folder / "model.safetensors").items():
        weight: Floats = tensor.float().numpy()
        name = stored.removesuffix(".weight")
        if not name.startswith("model.layers."):
            yield f"{_NAMES[name]}.weight", weight
            continue
        layer, own = name.removeprefix("model.layers.").split(".", 1)
        if own.startswith("mlp.experts."):
            number, projection = own.removeprefix("mlp.experts.").split(".")
            joined = f"blk.{layer}.{_NAMES[f'mlp.{projection}']}_exps.weight"
            parts = experts.setdefault(joined, {})
            parts[int(number)] = weight
            if len(parts) == config["num_experts"]:
                yield joined, np.stack([parts[n] for n in sorted(parts)])
                del experts[joined]
            continue
        kind = _NAMES[own]
        if kind in heads:
            weight = _interleave(weight, heads[kind])
        yield f"blk.{layer}.{kind}.weight", weight


def _interleave(weight: Floats, heads: int) -> Floats:
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


_WEIGHTS = {
    (LLAMA_CPP, "bfloat16"): ("bf16", "f16"),
    (LLAMA_CPP, "float32"): ("f32",),
    (LLAMA_CPP_8, "bfloat16"): ("q8_0",),
    (LLAMA_CPP_4, "bfloat16"): ("q4_0",),
}
_FLASH = (api.LLAMA_FLASH_ATTN_TYPE_ENABLED, api.LLAMA_FLASH_ATTN_TYPE_DISABLED)
_ROOM = 256  # tokens per sequence beyond the longest context
_AT_ONCE = 2048  # tokens per call
_TRIED_STEPS = 4
_SILENT = api.llama_log_callback(lambda _level, _text, _data: None)


class LlamaCpp:
    def __init__(self, config: ContestantConfig) -> None:
        api.llama_log_set(_SILENT, ctypes.c_void_p(0))
        api.llama_backend_init()
        kinds = _WEIGHTS[config.name, config.dtype]
        ways = itertools.product(kinds, _FLASH)
        models = {kind: _model(config, kind) for kind in kinds}
        threads = len(config.cores)
        self._all = [_Variant(models[kind], flash, threads) for kind, flash in ways]
        self._best: dict[Shape, _Variant] = {}

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        return self._all[0].greedy(prompt, count)

    def prepare(self, shape: Shape) -> None:
        taken = []
        for way in self._all:
            way.prepare(shape)
            taken.append(min(way.run(shape, _TRIED_STEPS).wall_s))
        self._best[shape] = self._all[taken.index(min(taken))]

    def run(self, shape: Shape, steps: int) -> StepTimes:
        return self._best[shape].run(shape, steps)


class _Variant:
    """One variant: a model with one kind of attention."""

    def __init__(self, model: api.llama_model_p, flash: int, threads: int) -> None:
        params = api.llama_context_default_params()
        params.n_seq_max = max(BATCHES)
        params.n_ctx = params.n_seq_max * (max(CONTEXTS) + _ROOM)
        params.n_batch = _AT_ONCE
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = flash
        params.kv_unified = False  # a sequence reads its own KV only
        self._context = api.llama_init_from_model(model, params)
        if self._context is None:
            raise RuntimeError("llama.cpp refused the context")
        self._memory = api.llama_get_memory(self._context)
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self._batch = api.llama_batch_init(_AT_ONCE, 0, 1)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        self._cut(0, 0)
        [token] = self._decode([(0, place, token) for place, token in enumerate(prompt)])
        tokens = [token]
        while len(tokens) < count:
            [token] = self._decode([(0, len(prompt) + len(tokens) - 1, tokens[-1])])
            tokens.append(token)
        self._cut(0, 0)
        return tokens

    def prepare(self, shape: Shape) -> None:
        if shape.prompt is not None:
            return
        self._extend(shape.context)
        for row in range(1, shape.batch):
            self._cut(row, 0)
            api.llama_memory_seq_cp(self._memory, 0, row, -1, -1)
        self.run(shape, 1)

    def run(self, shape: Shape, steps: int) -> StepTimes:
        if shape.prompt is not None:
            return self._prefill(shape.prompt)
        begin = shape.context - steps // 2 - 1
        for row in range(shape.batch):
            self._cut(row, begin)
        tokens = [3] * shape.batch
        watch = StepTimer()
        for place in range(begin, begin + steps):
            tokens = self._decode([(row, place, token) for row, token in enumerate(tokens)])
            watch.step(len(tokens))
        return watch.done()

    def _prefill(self, length: int) -> StepTimes:
        """Times a prompt in the last row, so that the other rows keep their KV."""
        row = max(BATCHES) - 1
        prompt = prompt_tokens(0, length, self._vocab_size)
        self._cut(row, 0)
        self._fill([(row, place, token) for place, token in enumerate(prompt)])
        watch = StepTimer()
        watch.step(len(self._next([length - 1])))
        return watch.done()

    def _extend(self, length: int) -> None:
        """Extends sequence 0 to `length` tokens."""
        known = int(api.llama_memory_seq_pos_max(self._memory, 0)) + 1
        if known < length:
            prompt = prompt_tokens(0, length, self._vocab_size)
            self._decode([(0, place, prompt[place]) for place in range(known, length)])

    def _cut(self, row: int, length: int) -> None:
        api.llama_memory_seq_rm(self._memory, row, length, -1)

    def _decode(self, wanted: Sequence[tuple[int, int, int]]) -> list[int]:
        """Computes (row, place, token) entries, sorted by place; returns the greedy next token of each row."""
        return self._next(self._fill(wanted))

    def _fill(self, wanted: Sequence[tuple[int, int, int]]) -> list[int]:
        """Fills the batch; returns the indices of the last token of each row."""
        batch = self._batch
        last = {row: index for index, (row, _, _) in enumerate(wanted)}
        for index, (row, place, token) in enumerate(wanted):
            batch.token[index] = token
            batch.pos[index] = place
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row
            batch.logits[index] = last[row] == index
        batch.n_tokens = len(wanted)
        return list(last.values())

    def _next(self, rows: Sequence[int]) -> list[int]:
        if api.llama_decode(self._context, self._batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [self._argmax(index) for index in rows]

    def _argmax(self, index: int) -> int:
        logits = api.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


def _model(config: ContestantConfig, kind: str) -> api.llama_model_p:
    path = scratch_file(config, f"-{kind}.gguf")
    if not path.exists():
        _write_gguf(Path(config.folder), path, kind)
    model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
    if model is None:
        raise RuntimeError(f"llama.cpp does not read {path}")
    return model


make = LlamaCpp
