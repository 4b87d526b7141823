"""How long a transfer may take, by its size: what its users give to `submit` as a deadline. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """A peer that stays below the slowest rate, over what a stall may last, is given up."""

    base_s: float = 10.0
    """For connecting, second attempts and a peer that is briefly stopped."""
    slowest_bytes_s: float = 50e6
    """Half of what a link of 1 Gbit/s carries."""

    def __post_init__(self) -> None:
        if self.base_s <= 0 or self.slowest_bytes_s <= 0:
            raise ConfigError("the transfers' timeout and slowest rate must be above 0")

    def deadline_s(self, nbytes: int) -> float:
        """`nbytes`: its own, and those that wait before it."""
        return self.base_s + nbytes / self.slowest_bytes_s
