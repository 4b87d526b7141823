"""A worker's replica: what fits in its memory, a lost rank, and wrong options, reported without importing torch."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from moonserve.engine.config import ReplicaConfig
from moonserve.engine.kv_cache.pool_size import plan_pool
from moonserve.engine.model.config import ModelConfig, load_model_config
from moonserve.engine.replica import load_replica, running_replica
from moonserve.protocol.errors import ConfigError, PeerLost
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.transfer import TransferEngine
from tests.engine.steps import GREEDY, last_of
from tests.patience import PATIENCE_S
from tests.random_models import make_model


@pytest.fixture(scope="module")
def model(model_path: Path) -> ModelConfig:
    return load_model_config(model_path)


def config_of(**changes: Any) -> ReplicaConfig:
    return ReplicaConfig(**{"instance_id": "w", "model": "m", "dtype": "float32", **changes})


def test_pool_plan_fits_the_memory_and_the_model(model: ModelConfig) -> None:
    plan = plan_pool(config_of(kv_cache_memory=100_000, block_size=8), model)
    assert plan.num_blocks == 100_000 // plan.layout.block_bytes
    assert plan.max_model_len == plan.num_blocks * 8
    assert plan_pool(config_of(), model).max_model_len == model.max_position_embeddings
    assert plan_pool(config_of(max_model_len=100), model).max_model_len == 100


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_cache_memory": 100}, "--kv-cache-memory 100 is less than one block"),
        ({"max_model_len": 5000}, "--max-model-len 5000 exceeds the model's 1024 positions"),
        ({"max_model_len": 1000, "kv_cache_memory": 65536}, "tokens that --kv-cache-memory 65536"),
        ({"block_size": 0}, "--block-size must be at least 1"),
        ({"max_num_seqs": 0}, "--max-num-seqs must be at least 1"),
        ({"num_threads": 0}, "--num-threads must be at least 1"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size must be at least 1"),
        ({"num_threads": 1, "tensor_parallel_size": 2}, "needs as many --num-threads"),
        ({"reserved_kv_share": 1.0}, "--reserved-kv-share must be from 0 to below 1"),
    ],
)
def test_plan_that_does_not_fit_names_the_flag(model: ModelConfig, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_pool(config_of(**changes), model)


async def test_failed_allocation_names_the_flag(model_path: Path) -> None:
    def allocate(nbytes: int) -> bytearray:
        raise MemoryError(f"{nbytes} is too much")

    config = config_of(model=str(model_path))
    with pytest.raises(ConfigError, match="too much; lower --kv-cache-memory"):
        await load_replica(config, allocate, Lifecycle(None))  # type: ignore[type-var]


def test_ranks_share_the_workers_threads() -> None:
    """A worker uses no more cores than it is given."""
    assert config_of(num_threads=4, tensor_parallel_size=2).threads_per_rank == 2


def test_workers_read_their_options_without_torch() -> None:
    code = (
        "import sys, moonserve.prefill_worker.worker, moonserve.decode_worker.worker\nsys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def ranks_of(path: Path, size: int) -> ReplicaConfig:
    shared = {"kernels": "torch", "kv_cache_memory": 1 << 20}
    return config_of(model=str(path), num_threads=size, tensor_parallel_size=size, **shared)


async def test_model_that_ranks_cannot_divide_is_refused(model_path: Path) -> None:
    """The model is refused before any process starts."""
    config = ranks_of(model_path, 3)
    refused = pytest.raises(ConfigError, match="does not divide")
    with TransferEngine(cluster_token="x") as transfer, refused:
        async with running_replica(config, transfer.allocate, Lifecycle(None)):
            pass


async def test_error_of_a_rank_that_cannot_start_is_reported(tmp_path: Path) -> None:
    make_model("llama", tmp_path)

    class Spoiling(Lifecycle):
        def progress(self, stage: str, fraction: float | None = None) -> None:
            if stage == "allocating memory":  # before rank 1 reads the file
                (tmp_path / "config.json").unlink()

    refused = pytest.raises(ConfigError, match=r"rank 1: .*config\.json")
    with TransferEngine(cluster_token="x") as transfer, refused:
        async with running_replica(ranks_of(tmp_path, 2), transfer.allocate, Spoiling(None)):
            pass


async def test_lost_rank_ends_the_worker(model_path: Path) -> None:
    """Without one of its ranks a worker can complete no step: it leaves, and its launcher starts another."""
    lifecycle = Lifecycle(None)
    others = set(psutil.Process().children())
    lost = pytest.raises(PeerLost, match=r"rank 1 \(exit code -9\) ended")
    with TransferEngine(cluster_token="x") as transfer, lost:
        async with running_replica(ranks_of(model_path, 2), transfer.allocate, lifecycle) as (replica, _):
            ranks = set(psutil.Process().children()) - others
            for rank in ranks:
                rank.kill()
            await asyncio.wait_for(lifecycle.stopping.wait(), PATIENCE_S)
            with pytest.raises(PeerLost, match="a rank is lost"):
                await replica.thread.execute([last_of([1, 2, 3], GREEDY)])
    assert not any(rank.is_running() for rank in ranks)
