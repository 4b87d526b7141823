"""Ranks as processes: what keeps them from starting. What they compute and how they die: tests/e2e."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.replica import loaded_replica
from engine.replica_config import ReplicaConfig
from protocol.errors import ConfigError
from protocol.process import Lifecycle
from tests.random_models import make_model
from transfer import TransferEngine


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    make_model("llama", tmp_path)
    return tmp_path


def config_of(path: Path, size: int) -> ReplicaConfig:
    return ReplicaConfig(
        instance_id="w",
        model=str(path),
        kernels="torch",
        kv_cache_memory=1 << 20,
        num_threads=size,
        tensor_parallel_size=size,
    )


async def test_a_model_that_ranks_cannot_share_is_refused(model_path: Path) -> None:
    """Before anything is started."""
    config = config_of(model_path, 3)
    refused = pytest.raises(ConfigError, match="does not divide")
    with TransferEngine(cluster_token="x") as transfer, refused:
        async with loaded_replica(config, transfer.allocate, Lifecycle(None)):
            pass


async def test_a_rank_that_cannot_start_is_told_in_its_own_words(model_path: Path) -> None:
    """Nothing of the worker is left then."""

    class Spoiling(Lifecycle):
        def progress(self, stage: str, fraction: float | None = None) -> None:
            if stage == "allocating memory":  # what rank 1 reads is gone by then
                (model_path / "config.json").unlink()

    refused = pytest.raises(ConfigError, match=r"rank 1: .*config\.json")
    with TransferEngine(cluster_token="x") as transfer, refused:
        async with loaded_replica(config_of(model_path, 2), transfer.allocate, Spoiling(None)):
            pass
