"""Process of a rank other than 0: loads its share of the weights, maps the pool and runs the steps that rank 0 sends.

A rank ends when rank 0 closes its end of the socket, orderly or not. Signals that reach the whole process group, such
as Ctrl-C, are handled by rank 0.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket
from dataclasses import dataclass, fields
from pathlib import Path

from engine.config import load_model_config, resolve_model
from engine.engine import Engine
from engine.parts import shards
from engine.replica_config import ReplicaConfig, cache_folder_of
from engine.tensor_parallel import steps
from engine.tensor_parallel.shared import Ranks, RanksLibrary
from engine.tensor_parallel.team import Team
from protocol.config import option
from protocol.errors import PeerLost
from protocol.process import Lifecycle

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RankConfig(ReplicaConfig):
    """Options of `moonserve tensor-parallel-rank`, set by rank 0."""

    tensor_parallel_rank: int = option(help="which rank it is, from 1")
    num_blocks: int = option(help="of the worker's pool")
    pool_fd: int = option(help="the pool's memory")
    steps_fd: int = option(help="socket on which steps are told")
    meeting_fd: int = option(help="memory that ranks share")


def rank_config(
    worker: ReplicaConfig,
    rank: int,
    *,
    num_blocks: int,
    pool_fd: int,
    steps_fd: int,
    meeting_fd: int,
    status_fd: int,
) -> RankConfig:
    """Returns the options of a rank of `worker`. A rank is not a member of the cluster and has no metrics port."""
    values = {each.name: getattr(worker, each.name) for each in fields(ReplicaConfig)}
    values |= {
        "instance_id": f"{worker.instance_id}-rank-{rank}",
        "port": 0,
        "conductor": None,
        "cluster_token": "",
        "metrics_port": 0,
        "status_fd": status_fd,
        "parent_pid": os.getpid(),
    }
    return RankConfig(
        **values,
        tensor_parallel_rank=rank,
        num_blocks=num_blocks,
        pool_fd=pool_fd,
        steps_fd=steps_fd,
        meeting_fd=meeting_fd,
    )


async def serve(config: RankConfig, lifecycle: Lifecycle) -> None:
    """Loads the engine and runs rank 0's steps until rank 0 ends. Raises ConfigError if it cannot start."""
    with socket.socket(fileno=config.steps_fd) as connection:
        lifecycle.progress("reading configuration")
        path = await asyncio.to_thread(resolve_model, config.model)
        engine = await asyncio.to_thread(_load, config, path, connection, lifecycle)
        lifecycle.ready(**facts(engine))
        await asyncio.to_thread(_follow, engine, connection)


def facts(engine: Engine) -> dict[str, str]:
    """Returns the properties in which all ranks must agree."""
    return {
        "fingerprint": engine.fingerprint,
        "kernels": engine.kernels_name,
        "attention": engine.attention_name,
    }


def _load(config: RankConfig, path: Path, connection: socket.socket, lifecycle: Lifecycle) -> Engine:
    model = load_model_config(path)
    rank, size, folder = (
        config.tensor_parallel_rank,
        config.tensor_parallel_size,
        cache_folder_of(config),
    )
    layout = model.kv_layout(config.block_size, config.dtype, config.kv_cache_dtype)
    library = RanksLibrary(folder)
    shared = mmap.mmap(config.meeting_fd, library.memory_bytes(size))
    ranks = Ranks(library, shared, rank=rank, size=size, sockets=[connection])
    pool = mmap.mmap(config.pool_fd, layout.pool_bytes(config.num_blocks))
    return Engine.load(
        path,
        config=model,
        layout=layout,
        num_blocks=config.num_blocks,
        memory=memoryview(pool),
        team=Team(shard=shards(model, size)[rank], ranks=ranks, vocab_size=model.vocab_size),
        dtype=model.resolve_dtype(config.dtype),
        num_threads=config.threads_per_rank,
        kernels=config.kernels,
        attention=config.kernels,
        load_format=config.load_format,
        cache_folder=folder,
        progress=lifecycle.progress,
    )


def _follow(engine: Engine, connection: socket.socket) -> None:
    try:
        while (message := steps.receive(connection)) is not None:
            engine.run(*steps.decode(message))
    except PeerLost as error:
        log.warning("ending: %s", error)
