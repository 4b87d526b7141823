"""Checkpoints that other programs quantised are loaded as the weights that they stand for.

The tests pack codes themselves, one by one, as the layouts are published.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from moonserve.engine.kv_cache.pool_size import weight_bytes
from moonserve.engine.model.config import load_model_config
from moonserve.engine.model.partition import split_into_shards
from moonserve.engine.model.transformers_config import read_config
from moonserve.engine.model.weights import load_weights
from moonserve.engine.model.weights.quantised_matrix import QuantisedMatrix
from moonserve.protocol.errors import ConfigError
from tests.engine.conftest import Pair
from tests.engine.kernels.test_quantised_product import E2M1
from tests.engine.steps import random_prompt, tokens_of
from tests.random_models import make_model

Tensors = dict[str, torch.Tensor]
Codes = npt.NDArray[np.int64]
PLAIN = ("lm_head", "layers.1.mlp.down_proj", "layers.0.self_attn.q_proj")
"""Modules that stay plain; the second one is fused with quantised ones."""


def packed(codes: Codes, bits: int) -> torch.Tensor:
    """Packs codes without sign along the last axis, the lowest bits first."""
    per_word = 32 // bits
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // per_word), np.int64)
    for place in range(codes.shape[-1]):
        words[..., place // per_word] |= codes[..., place] << bits * (place % per_word)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A quantised module: codes without sign [out, in], scales and zero points [out, groups]."""

    settings: dict[str, Any]
    tensors: Callable[[Codes, torch.Tensor, Codes], Tensors]
    bits: int = 4
    group: int | None = 128  # None: a whole row
    has_zeros: bool = False

    def make(self, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        """Returns the tensors of a module for any codes, and the weights that they stand for."""
        outputs, inputs = weight.shape
        generator = np.random.default_rng(outputs + inputs)
        group, half = self.group or inputs, 1 << (self.bits - 1)
        groups = -(-inputs // group)
        codes = generator.integers(0, 2 * half, (outputs, inputs))
        zeros = (
            generator.integers(1, 2 * half, (outputs, groups)) if self.has_zeros else np.full((outputs, groups), half)
        )
        scales = torch.from_numpy(generator.uniform(0.5, 1.5, (outputs, groups))) * float(weight.std()) / half
        scales = scales.bfloat16().float()  # exact in float16 too
        wide = np.arange(inputs) // group
        exact = torch.from_numpy(codes - zeros[:, wide]).float() * scales[:, wide]
        return self.tensors(codes, scales, zeros), exact


def compressed(bits: int) -> Callable[[Codes, torch.Tensor, Codes], Tensors]:
    def tensors(codes: Codes, scales: torch.Tensor, zeros: Codes) -> Tensors:
        return {
            "weight_packed": packed(codes, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(codes.shape),
            "weight_zero_point": packed(zeros.T.copy(), bits).T.contiguous(),
        }

    return tensors


def integers(codes: Codes, scales: torch.Tensor, zeros: Codes) -> Tensors:
    return {"weight": torch.from_numpy(codes - 128).to(torch.int8), "weight_scale": scales}


def awq(codes: Codes, scales: torch.Tensor, zeros: Codes) -> Tensors:
    def pack_outputs(values: Codes) -> torch.Tensor:  # place i of a word has output order[i] of 8
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return packed(values.T.reshape(values.shape[1], -1, 8)[..., order].reshape(values.shape[1], -1), 4)

    return {"qweight": pack_outputs(codes), "qzeros": pack_outputs(zeros), "scales": scales.T.half().contiguous()}


def gptq(bits: int, offset: int) -> Callable[[Codes, torch.Tensor, Codes], Tensors]:
    def tensors(codes: Codes, scales: torch.Tensor, zeros: Codes) -> Tensors:
        group = -(-codes.shape[1] // zeros.shape[1])
        return {
            "qweight": packed(codes, bits).T.contiguous(),
            "qzeros": packed(zeros.T - offset, bits),
            "scales": scales.T.half().contiguous(),
            "g_idx": (torch.arange(codes.shape[1]) // group).int(),
        }

    return tensors


def of_compressed(format: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True} | weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


def of_gptq(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True} | more


GROUPS_OF_32 = of_compressed("pack-quantized", num_bits=4, strategy="group", group_size=32)
ROWS_OF_8 = of_compressed("pack-quantized", num_bits=8, strategy="channel")
WITH_ZEROS = of_compressed("pack-quantized", num_bits=4, strategy="group", group_size=128, symmetric=False)
LAYOUTS = {
    "compressed-tensors, 4 bits": Layout(settings=GROUPS_OF_32, tensors=compressed(4), group=32),
    "compressed-tensors, zero points": Layout(settings=WITH_ZEROS, tensors=compressed(4), has_zeros=True),
    "compressed-tensors, 8 bits": Layout(settings=ROWS_OF_8, tensors=compressed(8), bits=8, group=None),
    "compressed-tensors, bytes": Layout(
        settings=of_compressed("int-quantized", num_bits=8, strategy="channel"), tensors=integers, bits=8, group=None
    ),
    "awq": Layout(
        settings={"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "GEMM"},
        tensors=awq,
        group=64,
        has_zeros=True,
    ),
    "gptq": Layout(settings=of_gptq(4, 128), tensors=gptq(4, 1)),
    "gptq, zero points": Layout(settings=of_gptq(4, 32, sym=False), tensors=gptq(4, 1), group=32, has_zeros=True),
    "gptq, 8 bits": Layout(settings=of_gptq(8, 256), tensors=gptq(8, 1), bits=8, group=256),
    "gptq of version 2": Layout(settings=of_gptq(4, -1, checkpoint_format="gptq_v2"), tensors=gptq(4, 0), group=None),
}


def rewrite(
    path: Path, settings: dict[str, Any], make: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
) -> Tensors:
    """Quantises the modules of a checkpoint except `PLAIN`. Returns the weights that it stands for."""
    stored, exact = load_file(path / "model.safetensors"), {}
    files: Tensors = {}
    for name, tensor in stored.items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj") and not module.endswith(PLAIN):
            tensors, exact[name] = make(tensor)
            files |= {f"{module}.{part}": value.contiguous() for part, value in tensors.items()}
        else:
            files[name] = exact[name] = tensor
    save_file(files, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return exact


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model("llama", tmp_path, hidden_size=128, intermediate_size=512, head_dim=32, tie_word_embeddings=False)
    return tmp_path


def fused(exact: Tensors, layer: int, *names: str) -> torch.Tensor:
    return torch.cat([exact[f"model.layers.{layer}.{name}_proj.weight"] for name in names])


MATRICES = (("self_attn.q", "self_attn.k", "self_attn.v"), ("self_attn.o",), ("mlp.gate", "mlp.up"), ("mlp.down",))


def assert_loaded(path: Path, exact: Tensors, tolerance: float = 0.0) -> None:
    weights = load_weights(path, load_model_config(path), torch.float32)
    for layer, own in enumerate(weights.layers):
        for matrix, names in zip(own.projections, MATRICES, strict=True):
            torch.testing.assert_close(matrix, fused(exact, layer, *names), rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_codes_become_the_weights_that_they_stand_for(name: str, model: Path) -> None:
    layout = LAYOUTS[name]
    exact = rewrite(model, layout.settings, layout.make)
    assert_loaded(model, exact)
    weights = load_weights(model, load_model_config(model), torch.float32, keeps_integers=True)
    kept = [isinstance(matrix, QuantisedMatrix) for own in weights.layers for matrix in own.projections]
    assert kept == [False, True, True, True, True, True, True, False], "a module that stays plain keeps others plain"
    assert replace(weights, layers=weights.layers[:1]).is_quantised, "also if q, k, v and the head are plain"
    prompts = [random_prompt(length, length) for length in (1, 40, 100)]
    native = Pair(model, None).engine(kernels="native", attention="native")  # type: ignore[arg-type]
    assert tokens_of(native, prompts, 8) == tokens_of(Pair(model, None).engine(), prompts, 8)  # type: ignore[arg-type]


def test_ranks_have_their_parts_of_the_codes(model: Path) -> None:
    layout = LAYOUTS["gptq, zero points"]
    exact = rewrite(model, layout.settings, layout.make)
    config = load_model_config(model)
    ranks = [load_weights(model, config, torch.float32, shard=shard) for shard in split_into_shards(config, 2)]
    parts = [rank.layers[1].o for rank in ranks]
    assert all(isinstance(part, torch.Tensor) for part in parts)
    assert torch.equal(torch.cat(parts, 1), fused(exact, 1, "self_attn.o"))  # type: ignore[arg-type]


def blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = torch.rand(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)) + 0.5
    wide = scales.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, : weight.shape[1]]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * wide


def one_scale(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes = (weight / 0.75).to(torch.float8_e4m3fn)
    own = {"weight": codes, "weight_scale": torch.tensor(0.75), "input_scale": torch.tensor(1.0)}
    return own, codes.float() * 0.75


def a_scale_per_output(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = torch.rand(len(weight), 1) + 0.5
    codes = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
OF_COMPRESSED_FP8 = of_compressed("float-quantized", num_bits=8, type="float", strategy="channel")


@pytest.mark.parametrize(
    ("settings", "make"),
    [(FP8 | {"weight_block_size": [128, 128]}, blocks), (FP8, one_scale), (OF_COMPRESSED_FP8, a_scale_per_output)],
    ids=["blocks", "one scale", "a scale per output"],
)
def test_fp8_becomes_plain_weights(settings: dict[str, Any], make: Callable[..., Any], model: Path) -> None:
    """They can be rounded by --quantize too."""
    exact = rewrite(model, settings, make)
    assert_loaded(model, exact, 1e-6)
    config = load_model_config(model)
    rounded = load_weights(model, config, torch.float32, keeps_integers=True, quantise="int4")
    assert all(isinstance(matrix, QuantisedMatrix) for matrix in rounded.projections)


def test_experts_in_mxfp4_give_the_tokens_of_the_model_that_they_stand_for(tmp_path: Path) -> None:
    model = make_model("gpt_oss", tmp_path, num_local_experts=4, num_experts_per_tok=2)
    stored, generator, plain = load_file(tmp_path / "model.safetensors"), np.random.default_rng(0), 0
    for name in [name for name in stored if name.endswith("_proj")]:
        plain += stored[name].numel() * 2
        experts, inputs, outputs = stored.pop(name).shape
        codes = torch.from_numpy(generator.integers(0, 16, (experts, outputs, inputs)))
        exponents = torch.from_numpy(generator.integers(122, 127, (experts, outputs, inputs // 32)))
        pairs = codes[..., ::2] | codes[..., 1::2] << 4
        stored[f"{name}_blocks"] = pairs.to(torch.uint8).view(experts, outputs, -1, 16)
        stored[f"{name}_scales"] = exponents.to(torch.uint8)
        exact = E2M1[codes] * (2.0 ** (exponents - 127)).repeat_interleave(32, 2)
        model.get_parameter(name).data = exact.mT.contiguous()
    plain_bytes = weight_bytes(load_model_config(tmp_path), 2)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert weight_bytes(load_model_config(tmp_path), 2) == plain_bytes - plain + plain * 4.5 / 16
    pair, prompts = Pair(tmp_path, model), [random_prompt(length, length) for length in (1, 40, 100)]
    pair.check(pair.engine(), prompts)
    native = pair.engine(kernels="native", attention="native")
    assert tokens_of(native, prompts, 10) == [pair.generate(prompt, 10) for prompt in prompts]
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="down_proj is quantised by mxfp4 but lacks its scales"):
        pair.engine()


def test_bytes_of_a_checkpoint_count_its_codes(model: Path) -> None:
    layout = LAYOUTS["awq"]
    plain = weight_bytes(load_model_config(model), 2)
    rewrite(model, layout.settings, layout.make)
    matrices = 2 * (128 * 256 + 128 * 128 + 3 * 128 * 512)
    assert weight_bytes(load_model_config(model), 2) == plain - matrices * 2 + matrices * 4.5 / 8


REFUSED = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes are not supported here"),
    ({"quant_method": "awq", "version": "gemv"}, "as gemv with 4 bits, only as gemm with 4"),
    (of_gptq(3, 128), "with 3 bits, only with 4 or 8"),
    (of_gptq(4, 128, desc_act=True), "with desc_act"),
    (of_gptq(4, 16), "in groups of 16, only of 32, 64 or multiples of 128"),
    (of_gptq(4, 128, dynamic={"-:.*mlp.*": {}}), "other settings for some modules"),
    (of_compressed("marlin-24", num_bits=4), "in format 'marlin-24'"),
    (of_compressed("pack-quantized", num_bits=2, strategy="group"), "as int of 2 bits by group"),
    (of_compressed("pack-quantized", num_bits=4, strategy="group", group_size=128, actorder="group"), "actorder group"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_other_methods_are_refused_by_name(settings: dict[str, Any], message: str, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ConfigError, match=f"{message}.*--engine vllm.*--quantize"):
        read_config(model)


def test_checkpoints_that_contradict_their_settings_are_refused(model: Path) -> None:
    layout = LAYOUTS["gptq"]
    rewrite(model, layout.settings, layout.make)
    config, stored = load_model_config(model), load_file(model / "model.safetensors")

    def load(**changed: torch.Tensor | None) -> None:
        tensors = {f"model.layers.0.mlp.down_proj.{name}": tensor for name, tensor in changed.items()}
        left = {name: tensor for name, tensor in (stored | tensors).items() if tensor is not None}
        save_file(left, model / "model.safetensors", metadata={"format": "pt"})
        load_weights(model, config, torch.float32)

    with pytest.raises(ConfigError, match="out of their order"):
        load(g_idx=torch.zeros(512, dtype=torch.int32))
    with pytest.raises(ConfigError, match="zero points although"):
        load(qzeros=torch.zeros(4, 16, dtype=torch.int32))
    with pytest.raises(ConfigError, match="exceed the range of float16"):
        load(scales=torch.full((4, 128), 1e9))
    with pytest.raises(ConfigError, match="down_proj is quantised by gptq but lacks scales"):
        load(scales=None)
    with pytest.raises(ConfigError, match="quantised by gptq already"):
        load_weights(model, config, torch.float32, quantise="int4")
