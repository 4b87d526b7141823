"""Options of a store node."""

from dataclasses import dataclass
from pathlib import Path

from moonserve.kvstore.state.allocator import ALIGNMENT
from moonserve.kvstore.state.eviction import DEFAULT_POLICY, POLICY_NAMES
from moonserve.kvstore.state.objects import Watermarks
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import option, parse_bytes
from moonserve.protocol.process.lifecycle import ProcessConfig
from moonserve.transfer.config import TransferConfig


@dataclass(frozen=True, kw_only=True)
class StoreConfig(ProcessConfig, TransferConfig):
    """All options of a store node."""

    dram: int = option(512 * 2**20, help="bytes of memory for objects", unit="bytes")
    eviction_policy: str = option(DEFAULT_POLICY, help="policy that chooses the objects to evict", choices=POLICY_NAMES)
    ssd: str | None = option(None, help="folder and size of the SSD tier for cold objects, as in /mnt/kv:64GiB")
    ssd_key_file: str | None = option(
        None,
        help="file with the key that encrypts the SSD tier: 32 bytes, or 64 hex digits",
    )
    ssd_write_through: bool = option(
        False, help="write every object to disk soon after it is stored, not only when it is demoted"
    )
    # Redis' `appendfsync everysec`: one flush a second costs nothing that can be measured.
    ssd_sync_interval_s: float = option(
        1.0,
        help="seconds between flushes of the disk; a loss of power costs at most the writes of this time, no removal;"
        " 0 = flush after every group of writes",
    )
    ssd_flush_s: float = option(
        60.0, help="seconds that an orderly stop may take to write objects to disk that are only in memory"
    )
    tenant_quota: tuple[str, ...] = option(
        (), help="bytes that each tenant may use on this node, as in alice=2GiB,bob=512MiB; others share the rest"
    )
    join: str | None = option(
        None,
        help="registry of the cluster: redis://…, redis+sentinel://… or host:port of a directory",
        masked=True,  # may contain a password
    )
    transfer_checksums: bool = option(
        False,
        help="verify a checksum of every slice in transfers; the checksums of objects are always verified;"
        " one end that sets it is enough",
    )
    # Mooncake's defaults: eviction starts at 90 % and frees 5 %.
    evict_above: float = option(0.90, help="evict objects when more than this share of the memory is used")
    evict_share: float = option(0.05, help="share of the memory that eviction then frees")
    # Mooncake's defaults: an abandoned put is preempted after 30 s, a read lease lasts 10 s.
    reservation_ttl_s: float = option(30.0, help="seconds after which the space of an unfinished put is reclaimed")
    lease_ttl_s: float = option(10.0, help="seconds that a read lease lasts unless its reader sets another time")
    removals_kept_s: float = option(
        86_400.0,
        help="seconds for which nodes keep removals; a node that was away for longer starts empty",
    )
    metrics_port: int = option(0, help="port for Prometheus metrics; 0 = none")
    kv_events: str | None = option(
        None, help="ZMQ endpoint at which stored and removed keys are published in vLLM's format, as tcp://*:5557"
    )
    kv_events_replay: str | None = option(None, help="ZMQ endpoint that repeats them, as tcp://*:5558")

    def watermarks(self) -> Watermarks:
        return Watermarks(evict_above=self.evict_above, evict_share=self.evict_share)

    def ssd_folder(self) -> tuple[Path, int] | None:
        """Returns the disk's folder and capacity in bytes; None without a disk. Raises ConfigError."""
        if self.ssd is None:
            return None
        folder, colon, size = self.ssd.rpartition(":")
        if not colon or not folder:
            raise ConfigError(f"--ssd {self.ssd!r} must be a folder and a size, as /mnt/kv:64GiB")
        return Path(folder), _bytes("--ssd", size)

    def quotas(self) -> dict[str, int]:
        """Returns the quotas in bytes by tenant. Raises ConfigError."""
        quotas: dict[str, int] = {}
        for entry in self.tenant_quota:
            tenant, equals, size = entry.rpartition("=")
            if not equals or not tenant or tenant in quotas:
                raise ConfigError(f"--tenant-quota {entry!r} must be tenant=size, each tenant once")
            quotas[tenant] = _bytes("--tenant-quota", size)
        return quotas

    def __post_init__(self) -> None:
        if self.dram < ALIGNMENT:
            raise ConfigError(f"--dram must be at least {ALIGNMENT} bytes, not {self.dram}")
        if not 0 <= self.evict_share <= self.evict_above <= 1:
            raise ConfigError("--evict-share and --evict-above must satisfy 0 ≤ share ≤ above ≤ 1")
        if min(self.reservation_ttl_s, self.lease_ttl_s) <= 0:
            raise ConfigError("--reservation-ttl-s and --lease-ttl-s must be above 0")
        if self.ssd_sync_interval_s < 0:
            raise ConfigError("--ssd-sync-interval-s must not be negative")
        if self.removals_kept_s <= 0:
            raise ConfigError("--removals-kept-s must be above 0")
        if self.join is not None and self.conductor is not None:
            raise ConfigError("give --join or --conductor, not both: each is a cluster of its own")
        self.ssd_folder()
        self.quotas()


def _bytes(flag: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from error
