"""Options of a worker that can change its role: those of a prefill worker, plus those that only a decode worker has."""

from __future__ import annotations

from dataclasses import dataclass, fields

from decode_worker.config import AllotmentConfig, DecodeConfig
from prefill_worker.config import PrefillConfig
from protocol.config import option
from protocol.errors import ConfigError
from protocol.ids import Role

# Longer than most answers take, shorter than the time in which load changes.
DEFAULT_ROLE_DRAIN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(PrefillConfig, AllotmentConfig):
    """Options of `moonserve worker --role-switching on`."""

    role: str = option(help="role at the start", choices=("prefill", "decode"))
    role_drain_s: float = option(
        DEFAULT_ROLE_DRAIN_S,
        help="seconds that what is under way gets to finish before a change of role; what is left is "
        "continued by other workers",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.as_decode()  # reports errors before anything is loaded
        if self.role_drain_s < 0:
            raise ConfigError("--role-drain-s must not be negative")

    @property
    def can_switch_role(self) -> bool:
        return True

    @property
    def first_role(self) -> Role:
        return Role(self.role)

    def as_decode(self) -> DecodeConfig:
        """Returns the options of its decode role. Raises ConfigError if it could not decode with them."""
        return DecodeConfig(**{each.name: getattr(self, each.name) for each in fields(DecodeConfig)})
