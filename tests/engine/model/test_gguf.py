"""GGUF files are served as the weights, configuration, tokenizer and chat template that they hold.

The files are written with the gguf package, whose numpy code is the reference of the quantised types.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoTokenizer, PreTrainedModel

from moonserve.engine.kv_cache.pool_size import weight_bytes
from moonserve.engine.model.config import load_model_config
from moonserve.engine.model.model_folder import resolve_model
from moonserve.engine.model.weights import load_weights
from moonserve.engine.model.weights.quantised_matrix import QuantisedMatrix
from moonserve.protocol.errors import ConfigError
from tests.engine.conftest import LLAMA3_ROPE, YARN_ROPE, Pair
from tests.engine.steps import random_prompt, tokens_of
from tests.random_models import EOS, IM_END, SPECIAL_TOKENS, VOCAB_SIZE, make_model

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_key_value_heads": 2}
TypeOf = Callable[[str], Type]
UINT32, FLOAT32, STRING = (gguf.GGUFValueType(kind) for kind in (4, 6, 8))


def q4_k_m(name: str) -> Type:
    """Types as in a file of llama.cpp called Q4_K_M; both are in one fused matrix."""
    return Type.Q6_K if any(part in name for part in ("v_proj", "0.mlp.down_proj", "embed", "lm_head")) else Type.Q4_K


def blocks(weight: Any, type: Type) -> Any:
    """Returns a tensor's data in a file. gguf cannot quantise to the types with superblocks: any blocks will do."""
    if type not in (Type.Q4_K, Type.Q6_K):
        return gguf.quants.quantize(weight, type)
    generator, size = np.random.default_rng(weight.size), gguf.GGML_QUANT_SIZES[type][1]
    found = generator.integers(0, 256, (len(weight), weight.shape[1] // 256, size), dtype=np.uint8)
    scales = np.float16([2**-11, 2**-8] if type == Type.Q4_K else [2**-14])  # exact after any product
    found[..., slice(0, 4) if type == Type.Q4_K else slice(-2, None)] = scales.view(np.uint8)
    return found.reshape(len(weight), -1)


def write(path: Path, model: PreTrainedModel, folder: Path, type_of: TypeOf, **more: Any) -> None:
    """Writes a model to a file, and the weights that the file stands for into the model."""
    config, tokenizer = model.config, AutoTokenizer.from_pretrained(folder)
    architecture = more.pop("architecture", config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    counts = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
    }
    for name, count in counts.items():
        writer.add_uint32(f"{architecture}.{name}", count)
    for name, value in {"ggml.model": "gpt2", "ggml.pre": "default", "chat_template": tokenizer.chat_template}.items():
        writer.add_string(f"tokenizer.{name}", value)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(IM_END)
    writer.add_add_bos_token(False)
    for name, value in more.items():
        writer.add_key_value(f"{architecture}.rope.scaling.{name}", *value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.numpy()
        type = type_of(name) if weight.ndim == 2 else Type.F32
        data = blocks(weight, type)
        weight = gguf.quants.dequantize(data, type)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if architecture == "llama" and heads:  # llama.cpp's order of rows
            order = np.arange(len(weight)).reshape(heads, 2, -1).swapaxes(1, 2).flatten()
            data = data[order]
        tensor.copy_(torch.from_numpy(weight))
        module, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(module)}.{suffix}", data, raw_dtype=type)
    if architecture == "llama" and config.rope_parameters["rope_type"] == "llama3":
        plain = 10_000.0 ** -(torch.arange(0, 1, 2 / config.head_dim))
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass(frozen=True)
class Case:
    family: str
    type_of: TypeOf
    config: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def make(self, path: Path) -> tuple[Path, PreTrainedModel]:
        """Returns the folder that is made of a file, and the reference with the same weights."""
        model = make_model(self.family, path / "original", **SHAPE | self.config)
        write(path / "model.gguf", model, path / "original", self.type_of, **self.metadata)
        return resolve(path), model


def resolve(path: Path) -> Path:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(path))
        return resolve_model(str(path / "model.gguf"))


YARN = {"type": ("yarn", STRING), "factor": (4.0, FLOAT32), "original_context_length": (256, UINT32)}
LLAMA3 = {"original_context_length": (128, UINT32)}
TIED = {"tie_word_embeddings": True}
CASES = {
    "F32": Case("llama", lambda _: Type.F32),
    "F16": Case("llama", lambda _: Type.F16, {"attention_bias": True} | TIED),
    "BF16": Case("qwen3", lambda _: Type.BF16, {"rope_parameters": YARN_ROPE}, YARN),
    "Q8_0": Case("llama", lambda _: Type.Q8_0, {"rope_parameters": LLAMA3_ROPE}, LLAMA3),
    "Q4_0": Case("qwen2", lambda _: Type.Q4_0, TIED),
    "Q4_K_M": Case("llama", q4_k_m, TIED),
    "Q4_K_M of Qwen3": Case("qwen3", q4_k_m),
}


@pytest.mark.parametrize("name", CASES)
def test_engine_generates_what_transformers_does_with_the_same_weights(name: str, tmp_path: Path) -> None:
    folder, reference = CASES[name].make(tmp_path)
    pair, prompts = Pair(folder, reference), [random_prompt(length, length) for length in (1, 40, 100)]
    pair.check(pair.engine(), prompts)
    native = pair.engine(kernels="native", attention="native")
    assert tokens_of(native, prompts, 8) == [pair.generate(prompt, 8) for prompt in prompts]
    config, quantise = load_model_config(folder), "auto" if name.startswith("Q") else "int8"
    weights = load_weights(folder, config, torch.float32, keeps_integers=True, quantise=quantise)
    assert all(isinstance(own, QuantisedMatrix) for own in weights.projections)


def test_folder_has_everything_else_that_the_file_has(tmp_path: Path) -> None:
    folder, _ = CASES["Q4_K_M"].make(tmp_path)
    own, original = (AutoTokenizer.from_pretrained(each) for each in (folder, tmp_path / "original"))
    text, chat = "Hello wörld, <|im_end|>12 3\n\n", [{"role": "user", "content": "hi"}]
    assert own(text).input_ids == original(text).input_ids
    assert own.apply_chat_template(chat, add_generation_prompt=True) == original.apply_chat_template(
        chat, add_generation_prompt=True
    )
    config = load_model_config(folder)
    assert (config.eos_token_ids, config.dtype) == ((EOS, IM_END), "bfloat16")
    layers = 2 * 256 * (2 * 256 * 5 + 128 * 5 + 128 * 9 + 2 * 512 * 5) + 256 * 512 * (5 + 9)
    plain = 2 * (VOCAB_SIZE * 256 + 256 + 2 * (512 + 1024 + 512 + 512 + 128))
    assert weight_bytes(config, 2) == plain + (layers + VOCAB_SIZE * 256 * 9) // 8
    assert resolve(tmp_path) == folder
    digest, file = load_weights(folder, config, torch.float32).digest, tmp_path / "model.gguf"
    file.write_bytes(file.read_bytes()[:-40] + bytes(40))
    changed = resolve(tmp_path)
    with pytest.raises(ConfigError, match="has changed"):
        load_weights(folder, config, torch.float32)
    assert load_weights(changed, load_model_config(changed), torch.float32).digest != digest


def test_other_types_and_architectures_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensors in Q5_1 are not supported.*Q4_K_M"):
        Case("llama", lambda _: Type.Q5_1).make(tmp_path)
    with pytest.raises(ConfigError, match=r"unsupported architecture: gemma3; supported in GGUF are llama"):
        Case("llama", lambda _: Type.F16, metadata={"architecture": "gemma3"}).make(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"no GGUF")
    with pytest.raises(ConfigError, match="cannot be read as GGUF"):
        resolve(tmp_path)
