"""Options of a rank behind rank 0: those of the worker, which rank it is, and what it has been handed."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

from engine.replica_config import ReplicaConfig
from protocol.config import option


@dataclass(frozen=True, kw_only=True)
class RankConfig(ReplicaConfig):
    """`python -m engine.tensor_parallel`, as rank 0 starts it."""

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
    """Of a process that `worker`'s starts. It is no member of the cluster, and nobody scrapes it."""
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
