"""Reads config.json: the meaning of each field, and one clear error for each way in which it can be wrong."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from moonserve.engine.kernels.rope import RopeTable
from moonserve.engine.model.config import load_model_config
from moonserve.engine.model.model_folder import resolve_model
from moonserve.protocol.errors import ConfigError
from tests.engine.conftest import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "eos_token_id": 7,
}


def write(path: Path, **fields: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**BASE, **fields}))
    return path


def test_end_tokens_come_from_both_files_and_are_in_the_vocabulary(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=[-1, 7, 100])
    assert load_model_config(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert load_model_config(tmp_path).eos_token_ids == (9, 7)


def test_rope_is_read_in_its_old_and_its_new_form(tmp_path: Path) -> None:
    old = load_model_config(write(tmp_path, rope_theta=2e4, rope_scaling={"type": "linear", "factor": 2.0}))
    new = load_model_config(write(tmp_path, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 2e4}))
    assert old.rope == new.rope
    assert new.rope.factor == 2.0


USED = {"sliding_window": 8, "use_sliding_window": True}
LAYER_TYPES = ["sliding_attention", "full_attention", "full_attention"]


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 3),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}, (None,) * 3),
        ({"architectures": ["Qwen2ForCausalLM"], **USED, "max_window_layers": 1}, (None, 8, 8)),
        ({"architectures": ["Qwen3ForCausalLM"], **USED, "layer_types": LAYER_TYPES}, (8, None, None)),
    ],
)
def test_sliding_windows_are_read_per_layer(
    fields: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    assert load_model_config(write(tmp_path, **fields)).sliding_windows == windows


@pytest.mark.parametrize("beside", [{}, {"sliding_window": None}], ids=["absent", "null"])
@pytest.mark.parametrize("kind", [MistralConfig, Qwen2Config, Qwen3Config])
def test_missing_window_has_the_default_of_transformers_and_null_means_none(
    kind: Any, beside: dict[str, Any], tmp_path: Path
) -> None:
    name = kind.__name__.replace("Config", "ForCausalLM")
    fields = {"architectures": [name], "use_sliding_window": True, "max_window_layers": 0, **beside}
    window = kind(**fields).sliding_window
    assert load_model_config(write(tmp_path, **fields)).sliding_windows == (window,) * 3


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_missing_fields_have_the_defaults_of_transformers(kind: Any, tmp_path: Path) -> None:
    fields = {
        "architectures": [kind.__name__.replace("Config", "ForCausalLM")],
        **{"vocab_size": 64, "hidden_size": 512, "intermediate_size": 96},
        **{"num_hidden_layers": 2, "num_attention_heads": 32},
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    own, theirs = load_model_config(tmp_path), kind(**fields)
    assert own.num_kv_heads == theirs.num_key_value_heads
    assert own.head_dim == (theirs.head_dim if kind is not Qwen2Config else 16)
    assert own.max_position_embeddings == theirs.max_position_embeddings
    assert own.rms_norm_eps == theirs.rms_norm_eps
    assert own.rope.theta == theirs.rope_parameters["rope_theta"]
    assert own.tie_word_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel; supported are LlamaForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": 65}, "hidden_size 65 is not a multiple"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers must be an integer"),
        ({"num_hidden_layers": 0}, "at least 1"),
        ({"head_dim": 15}, "even"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"torch_dtype": "int8"}, "int8"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": "linear"}, "must be an object"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
            "partial_rotary_factor is not supported",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, r"layer \(full_attention\)"),
    ],
)
def test_invalid_config_is_refused_with_its_reason(fields: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_model_config(write(tmp_path, **fields))
    assert "config.json" in str(caught.value)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{\n  "vocab_size": 3,,\n}')
    with pytest.raises(ConfigError, match="line 2, column"):
        load_model_config(tmp_path)
    with pytest.raises(ConfigError, match="float64"):
        load_model_config(write(tmp_path)).kv_layout(16, "float64")


@pytest.mark.parametrize("name", ["./missing/model", "missing", "a/b/c", "/nowhere/at/all"])
def test_name_that_is_neither_folder_nor_hub_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a hub name"):
        resolve_model(name)


def test_folder_is_used_directly_and_hub_name_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model(str(tmp_path / "model.safetensors"))
    download = Mock(side_effect=[str(tmp_path), str(tmp_path), OSError("no route to host")])
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("someone/model") == tmp_path
    with pytest.raises(ConfigError, match=r"someone/model .*OSError: no route to host"):
        resolve_model("someone/model")
    assert all(call.kwargs.keys() == {"allow_patterns"} for call in download.call_args_list)


HEAD_DIM = 32
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 500_000.0}


@pytest.mark.parametrize(
    ("rope", "beside"),
    [
        (PLAIN_ROPE, {}),
        (LINEAR_ROPE, {}),
        (LLAMA3_ROPE, {}),
        (YARN_ROPE, {}),
        ({**YARN_ROPE, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0}, {}),
        ({**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.5}, {}),
        ({**YARN_ROPE, "attention_factor": 1.25}, {}),
        (DYNAMIC_ROPE, {}),
        # original_max_position_embeddings outside the rope parameters takes precedence over the one inside.
        (LLAMA3_ROPE, {"original_max_position_embeddings": 512}),
        (YARN_ROPE, {"original_max_position_embeddings": 512}),
        # An empty rope_scaling gives way to the newer form.
        (LINEAR_ROPE, {"rope_scaling": {}}),
        # A partial rotary factor next to the default rope is ignored.
        (PLAIN_ROPE, {"partial_rotary_factor": 0.5}),
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_cosines_and_sines_equal_those_of_transformers(
    rope: dict[str, Any], beside: dict[str, Any], tmp_path: Path
) -> None:
    fields = {"head_dim": HEAD_DIM, "max_position_embeddings": 1024, "rope_parameters": rope, **beside}
    config = LlamaConfig.from_pretrained(write(tmp_path, **fields))
    positions = torch.arange(1000)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    own = load_model_config(tmp_path)
    found_cos, found_sin = RopeTable(own.rope, HEAD_DIM, torch.float32).rows(positions, 1000)
    torch.testing.assert_close(found_cos[:, 0], cos[0], atol=1e-6, rtol=1e-6)
    signs = torch.tensor([-1.0, 1.0]).repeat_interleave(HEAD_DIM // 2)
    torch.testing.assert_close(found_sin[:, 0], sin[0] * signs, atol=1e-6, rtol=1e-6)


def test_growing_the_rope_table_does_not_change_positions(tmp_path: Path) -> None:
    fields = {"head_dim": HEAD_DIM, "max_position_embeddings": 64, "rope_scaling": DYNAMIC_ROPE}
    config = load_model_config(write(tmp_path, **fields))
    positions = torch.tensor([3, 63, 64, 90])
    small = RopeTable(config.rope, HEAD_DIM, torch.float32).rows(positions, 91)
    table = RopeTable(config.rope, HEAD_DIM, torch.float32)
    table.rows(torch.tensor([999]), 1000)
    for one, other in zip(small, table.rows(positions, 1000), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)
