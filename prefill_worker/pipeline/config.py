"""Options of a follower: those of its leader, and which of the stages it is."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace

from prefill_worker.config import PrefillConfig
from protocol.config import option
from protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class FollowerConfig(PrefillConfig):
    """`python -m prefill_worker.pipeline`, as a leader starts it."""

    pipeline_rank: int = option(help="which stage it is, from 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.pipeline_rank < self.pipeline_parallel_size:
            raise ConfigError(
                f"--pipeline-rank {self.pipeline_rank} is none of the stages 1 to "
                f"{self.pipeline_parallel_size - 1} of --pipeline-parallel-size {self.pipeline_parallel_size}"
            )


def follower_config(leader: PrefillConfig, rank: int, status_fd: int) -> FollowerConfig:
    """Of a process that `leader`'s starts. It is no member of the cluster, and nobody scrapes it."""
    own = replace(
        leader,
        instance_id=f"{leader.instance_id}-stage-{rank}",
        port=0,
        conductor=None,
        metrics_port=0,
        status_fd=status_fd,
        parent_pid=os.getpid(),
    )
    values = {each.name: getattr(own, each.name) for each in fields(PrefillConfig)}
    return FollowerConfig(**values, pipeline_rank=rank)
