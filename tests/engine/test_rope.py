"""Rotary frequencies equal those of transformers for every supported type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.config import load_model_config
from engine.rope import RopeTable
from tests.engine.conftest import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE

HEAD_DIM = 32
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": HEAD_DIM},
    "max_position_embeddings": 1024,
}


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
        # A context of pre-training beside the rope counts before that in it,
        (LLAMA3_ROPE, {"original_max_position_embeddings": 512}),
        (YARN_ROPE, {"original_max_position_embeddings": 512}),
        # an older form that is empty gives way to the newer one,
        (LINEAR_ROPE, {"rope_scaling": {}}),
        # and a part of the head beside the default rope means nothing.
        (PLAIN_ROPE, {"partial_rotary_factor": 0.5}),
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_cosines_and_sines_equal_those_of_transformers(
    rope: dict[str, Any], beside: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FIELDS, "rope_parameters": rope, **beside}))
    config = LlamaConfig.from_pretrained(tmp_path)
    positions = torch.arange(1000)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    own = load_model_config(tmp_path)
    found_cos, found_sin = RopeTable(own.rope, HEAD_DIM, torch.float32).rows(positions, 1000)
    torch.testing.assert_close(found_cos[:, 0], cos[0], atol=1e-6, rtol=1e-6)
    signs = torch.tensor([-1.0, 1.0]).repeat_interleave(HEAD_DIM // 2)
    torch.testing.assert_close(found_sin[:, 0], sin[0] * signs, atol=1e-6, rtol=1e-6)


def test_a_position_means_the_same_however_far_the_table_has_grown(tmp_path: Path) -> None:
    fields = {**FIELDS, "max_position_embeddings": 64, "rope_scaling": DYNAMIC_ROPE}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = load_model_config(tmp_path)
    positions = torch.tensor([3, 63, 64, 90])
    small = RopeTable(config.rope, HEAD_DIM, torch.float32).rows(positions, 91)
    table = RopeTable(config.rope, HEAD_DIM, torch.float32)
    table.rows(torch.tensor([999]), 1000)
    for one, other in zip(small, table.rows(positions, 1000), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)
