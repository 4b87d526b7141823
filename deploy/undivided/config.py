"""Options of a decode worker that also prefills: those of a decode worker, plus those for stores and the TBT target."""

from __future__ import annotations

from dataclasses import dataclass

from conductor.config import ConductorConfig
from decode_worker.config import DecodeConfig
from protocol.config import option, require_at_least_1
from protocol.errors import ConfigError
from transfer.config import PatienceConfig

DEFAULT_TBT_SLO_S: float = ConductorConfig.tbt_slo


@dataclass(frozen=True, kw_only=True)
class UndividedConfig(DecodeConfig, PatienceConfig):
    """Options of `moonserve worker --role decode --conditional-disaggregation on`."""

    tbt_slo: float = option(
        DEFAULT_TBT_SLO_S,
        help="seconds between tokens, as the conductor is told; steps with chunks of prompts take half of it",
    )
    max_put_blocks: int = option(64, help="blocks on their way to a store at once")
    max_pending_puts: int = option(4096, help="blocks waiting for that; more are dropped")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least_1(self, "max_put_blocks", "max_pending_puts")
        self.transfer_patience()
        if self.async_scheduling:
            raise ConfigError(
                "--async-scheduling does not go with --conditional-disaggregation, whose steps are cut by their time"
            )
        if not self.tbt_slo > 0:
            raise ConfigError("--tbt-slo must be positive")
