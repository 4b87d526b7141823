"""Which device a replica computes on, and what it says where that cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from decode_worker.config import DecodeConfig
from engine.cuda import requirements
from engine.device import count_gpus, resolve_device, visible_gpus
from engine.replica_config import ReplicaConfig
from prefill_worker.config import PrefillConfig
from protocol.errors import ConfigError


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """A machine with a GPU that torch sees; None: with one that it does not see."""
    monkeypatch.setattr("engine.device.count_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_auto_takes_the_gpu_that_kernels_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (9, 0))
    assert resolve_device("auto") == resolve_device("cuda") == "cuda"
    assert resolve_device("cpu") == "cpu"


def test_auto_is_the_cpu_where_no_driver_shows_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.device.count_gpus", lambda: 0)
    assert resolve_device("auto") == "cpu"


@pytest.mark.parametrize(
    ("capability", "words"),
    [(None, "torch sees no GPU"), ((7, 5), "compute capability 7.5, and 8.0 is the least")],
)
def test_a_gpu_that_cannot_be_used_is_left_or_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, words: str
) -> None:
    gpu(monkeypatch, capability)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=f"--device cuda: .*{words}.*--device cpu"):
        resolve_device("cuda")


def test_without_triton_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(requirements, "find_spec", lambda _name: None)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=r"pip install 'moonserve\[gpu\]'"):
        resolve_device("cuda")


def test_gpus_are_counted_where_drivers_show_them(tmp_path: Path) -> None:
    assert count_gpus(tmp_path) == 0
    for name in ("0000:01:00.0", "0000:41:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "dev/nvidiactl").touch()
    assert count_gpus(tmp_path) == 2


def test_gpus_that_were_chosen_are_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.device.count_gpus", lambda: 2)
    assert visible_gpus({}) == ("0", "1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-5d"}) == ("3", "GPU-5d")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


@pytest.mark.parametrize("device", ["cuda", "cpu-staged"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 2, "num_threads": 2}, "--tensor-parallel-size"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"elastic_kv_memory": True}, "elastic KV memory"),
    ],
)
def test_what_shares_memory_on_processors_is_refused(
    device: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"{words}.* with --device cpu only, not {device}"):
        PrefillConfig(instance_id="w", model="m", device=device, **options)


@pytest.mark.parametrize("options", [{"kernels": "native"}, {"kv_cache_dtype": "fp8"}])
def test_what_only_processors_compute_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="with --device cpu only, not cuda"):
        ReplicaConfig(instance_id="w", model="m", device="cuda", **options)
    ReplicaConfig(instance_id="w", model="m", device="cpu-staged", **options)


def test_decode_steps_run_ahead_on_gpus_unless_told_otherwise() -> None:
    def runs_ahead(device: str, wish: bool | None) -> bool:
        return DecodeConfig(instance_id="w", model="m", async_scheduling=wish).runs_ahead(device)

    assert runs_ahead("cuda", None)
    assert not runs_ahead("cpu", None)
    assert runs_ahead("cpu", True)
    assert not runs_ahead("cuda", False)
    with pytest.raises(ConfigError, match="--async-scheduling does not go with elastic"):
        DecodeConfig(instance_id="w", model="m", async_scheduling=True, elastic_kv_memory=True)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.1])
def test_a_share_of_memory_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-utilization is a share"):
        ReplicaConfig(instance_id="w", model="m", gpu_memory_utilization=share)
