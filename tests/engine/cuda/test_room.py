"""What is left of a GPU's memory for KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from engine.config import load_model_config
from engine.cuda.room import RESERVE_BYTES, room_on_gpu, step_bytes, weight_bytes
from engine.pool_plan import plan_pool
from engine.replica_config import ReplicaConfig
from protocol.errors import ConfigError
from tests.random_models import FAMILIES, make_model

GIB = 1 << 30


def config_of(**changes: Any) -> ReplicaConfig:
    return ReplicaConfig(**{"instance_id": "w", "model": "m", "dtype": "bfloat16", **changes})


def gpu(monkeypatch: pytest.MonkeyPatch, free: int, total: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, total))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_weights_are_reckoned_as_what_a_checkpoint_holds(family: str, tmp_path: Path) -> None:
    """At most a tenth above it: biases and norms are counted for families that have none."""
    make_model(family, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        held = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    found = weight_bytes(load_model_config(tmp_path), 1)
    assert held <= found <= 1.1 * held


def test_kv_gets_the_share_without_weights_steps_and_reserve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_model("llama", tmp_path)
    model, config = load_model_config(tmp_path), config_of(gpu_memory_utilization=0.5)
    gpu(monkeypatch, 75 * GIB, 80 * GIB)
    room = room_on_gpu(config, model)
    taken = weight_bytes(model, 2) + step_bytes(config, model, 2)
    assert room.nbytes == 40 * GIB - taken - RESERVE_BYTES
    plan = plan_pool(config, model, room=room)
    assert plan.num_blocks == room.nbytes // plan.layout.block_bytes


@pytest.mark.parametrize(
    ("free", "total", "words"),
    [
        (30 * GIB, 80 * GIB, "0.5 of the GPU's .* more than the .* free: lower it"),
        (2 * GIB, 2 * GIB, "weights and steps take .*: raise it, lower --max-num-batched-tokens"),
    ],
)
def test_too_little_memory_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, total: int, words: str
) -> None:
    make_model("llama", tmp_path)
    gpu(monkeypatch, free, total)
    with pytest.raises(ConfigError, match=words):
        room_on_gpu(config_of(gpu_memory_utilization=0.5), load_model_config(tmp_path))
