"""Choice of a replica's device, memory left for KV on a GPU, and the error if a device cannot be used."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from moonserve.decode_worker.config import DecodeConfig
from moonserve.engine.config import ReplicaConfig
from moonserve.engine.cuda import device
from moonserve.engine.cuda.device import count_gpus, resolve_device, visible_gpus
from moonserve.engine.kv_cache.pool_size import RESERVE_BYTES, gpu_kv_budget, plan_pool, step_bytes, weight_bytes
from moonserve.engine.model.config import load_model_config
from moonserve.prefill_worker.config import PrefillConfig
from moonserve.protocol.errors import ConfigError
from tests.random_models import FAMILIES, make_model

GIB = 1 << 30


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """Simulates a machine with one GPU of this compute capability. None: torch does not see the GPU."""
    monkeypatch.setattr("moonserve.engine.cuda.device.count_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_auto_selects_a_usable_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (9, 0))
    assert resolve_device("auto") == resolve_device("cuda") == "cuda"
    assert resolve_device("cpu") == "cpu"
    monkeypatch.setattr("moonserve.engine.cuda.device.count_gpus", lambda: 0)
    assert resolve_device("auto") == "cpu", "no driver shows one"


@pytest.mark.parametrize(
    ("capability", "has_triton", "words"),
    [
        (None, True, "torch sees no GPU"),
        ((7, 5), True, "compute capability 7.5, and at least 8.0 is required"),
        ((9, 0), False, r"pip install 'moonserve\[gpu\]'"),
    ],
)
def test_unusable_gpu_is_skipped_by_auto_and_refused_by_cuda(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, has_triton: bool, words: str
) -> None:
    gpu(monkeypatch, capability)
    monkeypatch.setattr(device, "find_spec", lambda _name: object() if has_triton else None)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=f"--device cuda: .*{words}.*--device cpu"):
        resolve_device("cuda")


def test_triton_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_interpreted", lambda: False)
    monkeypatch.setattr(device, "find_spec", lambda _name: object())
    device.require_triton(torch.device("cuda"))
    with pytest.raises(ConfigError, match="CUDA"):
        device.require_triton(torch.device("cpu"))
    with pytest.raises(ConfigError, match="abacus"):
        device.find_device("abacus")


def test_gpus_are_counted_in_driver_folders(tmp_path: Path) -> None:
    assert count_gpus(tmp_path) == 0
    for name in ("0000:01:00.0", "0000:41:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "dev/nvidiactl").touch()
    assert count_gpus(tmp_path) == 2


def test_visible_gpus_follow_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonserve.engine.cuda.device.count_gpus", lambda: 2)
    assert visible_gpus({}) == ("0", "1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-5d"}) == ("3", "GPU-5d")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


SHARED: list[tuple[dict[str, Any], str]] = [
    ({"tensor_parallel_size": 2, "num_threads": 2}, "--tensor-parallel-size"),
    ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
    ({"elastic_kv_memory": True}, "elastic KV memory"),
]
COMPUTED: list[tuple[dict[str, Any], str]] = [
    ({"kernels": "native"}, "--kernels native"),
    ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
]


@pytest.mark.parametrize(
    ("device", "options", "words"),
    [("cuda", *each) for each in (*SHARED, *COMPUTED)] + [("cpu-staged", *each) for each in SHARED],
)
def test_options_that_need_a_cpu_are_refused(device: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"{words}.* with --device cpu only, not {device}"):
        PrefillConfig(instance_id="w", model="m", device=device, **options)


def test_decode_steps_run_ahead_on_gpus_by_default() -> None:
    def runs_ahead(device: str, wish: bool | None) -> bool:
        return DecodeConfig(instance_id="w", model="m", async_scheduling=wish).runs_ahead(device)

    assert runs_ahead("cuda", None)
    assert not runs_ahead("cpu", None)
    assert runs_ahead("cpu", True)
    assert not runs_ahead("cuda", False)
    with pytest.raises(ConfigError, match="--async-scheduling cannot be combined with elastic"):
        DecodeConfig(instance_id="w", model="m", async_scheduling=True, elastic_kv_memory=True)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.1])
def test_invalid_memory_utilization_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-utilization must be"):
        ReplicaConfig(instance_id="w", model="m", gpu_memory_utilization=share)


# -- memory for KV

HALF = ReplicaConfig(instance_id="w", model="m", dtype="bfloat16", gpu_memory_utilization=0.5)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_weight_bytes_are_close_to_the_size_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    """The estimate is at most a tenth too high: biases and norms are counted for families without them."""
    make_model(family, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        held = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    found = weight_bytes(load_model_config(tmp_path), 1)
    assert held <= found <= 1.1 * held


def test_kv_budget_excludes_weights_steps_and_reserve(monkeypatch: pytest.MonkeyPatch, model_path: Path) -> None:
    model, config = load_model_config(model_path), HALF
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (75 * GIB, 80 * GIB))
    budget = gpu_kv_budget(config, model)
    taken = weight_bytes(model, 2) + step_bytes(config, model, 2)
    assert budget.nbytes == 40 * GIB - taken - RESERVE_BYTES
    plan = plan_pool(config, model, budget=budget)
    assert plan.num_blocks == budget.nbytes // plan.layout.block_bytes


@pytest.mark.parametrize(
    ("free", "total", "words"),
    [
        (30 * GIB, 80 * GIB, "0.5 of the GPU's .* more than the .* free: lower it"),
        (2 * GIB, 2 * GIB, "weights and steps take .*: raise it, lower --max-num-batched-tokens"),
    ],
)
def test_too_little_gpu_memory_is_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, free: int, total: int, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, total))
    with pytest.raises(ConfigError, match=words):
        gpu_kv_budget(HALF, load_model_config(model_path))
