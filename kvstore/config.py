"""Options of a store node."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.allocator import ALIGNMENT
from kvstore.catalog import Watermarks
from kvstore.eviction import DEFAULT_POLICY, POLICY_NAMES
from protocol.config import option
from protocol.errors import ConfigError
from protocol.process import ProcessConfig
from transfer.config import TransferConfig


@dataclass(frozen=True, kw_only=True)
class StoreConfig(ProcessConfig, TransferConfig):
    """Everything a store node can be told."""

    dram: int = option(512 * 2**20, help="bytes of memory for objects", unit="bytes")
    eviction_policy: str = option(
        DEFAULT_POLICY, help="which objects go first", choices=POLICY_NAMES
    )
    # Mooncake's defaults: eviction starts at 90 % and frees 5 %.
    evict_above: float = option(0.90, help="evict when more than this share of the memory is used")
    evict_share: float = option(0.05, help="share of the memory that is then freed")
    # Mooncake's defaults: an abandoned put is preempted after 30 s, a read lease lasts 10 s.
    reservation_ttl_s: float = option(30.0, help="reclaim what a writer left unfinished, seconds")
    lease_ttl_s: float = option(10.0, help="life of a read lease that names none, seconds")
    metrics_port: int = option(0, help="port for Prometheus metrics; 0 = none")

    def watermarks(self) -> Watermarks:
        return Watermarks(evict_above=self.evict_above, evict_share=self.evict_share)

    def __post_init__(self) -> None:
        if self.dram < ALIGNMENT:
            raise ConfigError(f"--dram must be at least {ALIGNMENT} bytes, not {self.dram}")
        if not 0 <= self.evict_share <= self.evict_above <= 1:
            raise ConfigError("--evict-share and --evict-above must satisfy 0 ≤ share ≤ above ≤ 1")
        if min(self.reservation_ttl_s, self.lease_ttl_s) <= 0:
            raise ConfigError("--reservation-ttl-s and --lease-ttl-s must be above 0")
