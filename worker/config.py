"""Command line options of workers of both roles."""

from __future__ import annotations

from dataclasses import dataclass

from engine.replica_config import ReplicaConfig
from protocol.config import option
from protocol.errors import ConfigError
from transfer.config import TransferConfig


@dataclass(frozen=True, kw_only=True)
class RoleConfig(ReplicaConfig, TransferConfig):
    """Options of a worker of either role."""

    home_store: str | None = option(
        None,
        help="instance id of the store node that keeps this worker's blocks: those of prompts, those of answers, and "
        "those of sequences that gave way, where that is cheaper than to compute them again",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.home_store is not None and self.conductor is None:
            raise ConfigError("--home-store needs --conductor, which knows where the store is")
