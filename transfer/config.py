"""Configuration of a transfer engine: options, command-line flags, time limits and injected faults."""

import ipaddress
import threading
from dataclasses import dataclass, field

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import option
from moonserve.protocol.process.tls import TlsConfig, TlsFiles

_SLICE_BYTES = {"shm": 16 << 20, "tcp": 4 << 20, "rdma": 16 << 20}
"""Default slice sizes. Within a host cutting gains nothing, but slices must be short enough to take turns. Over rdma
each WRITE slice needs a grant, and both queue pairs must always have one (LOG.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """Options of one engine. Defaults fit one machine with its store and workers; sizes are in bytes."""

    host: str = "127.0.0.1"
    """Address that peers can reach; the only TCP rail if `rails` is empty."""
    transports: tuple[str, ...] = ("shm", "tcp")
    """Transport names in order of preference."""
    rails: tuple[str, ...] = ()
    """Local addresses (TCP, one rail each) and device ports (RDMA, "mlx5_0:1"). Empty: discovered."""
    streams: int | None = None
    """TCP connections per pair of rails. None: chosen by the round-trip time of the first (`streams_for`)."""
    checksums: bool = True
    """Protects every slice by XXH3-64, computed by the sender and verified by the receiver. A copy within a host is
    compared with its source instead."""
    slice_bytes: int | None = None
    """Upper bound of a slice; transfers are cut accordingly. None: a default per transport."""
    max_in_flight_bytes: int = 8 << 20
    """Bytes per connection that are requested before answers arrive. shm and rdma raise it to at least 64 MiB."""
    max_endpoints: int = 512
    """Upper bound of connections that this engine has opened. Idle ones are evicted first (SIEVE)."""
    tls: TlsFiles | None = None
    """Files for TLS on tcp, with both ends verified against the authority. None: no TLS."""

    def __post_init__(self) -> None:
        if not self.transports:
            raise ConfigError("no transports: choose from shm, tcp, rdma")
        for name in ("streams", "slice_bytes", "max_in_flight_bytes", "max_endpoints"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"transfer {name.replace('_', ' ')} must be at least 1")
        if self.tls is not None and "rdma" in self.transports:
            raise ConfigError(
                "rdma cannot be encrypted: remove it from --transports, or pass --no-transfer-tls if only the cluster "
                "uses its network"
            )

    def slice_bytes_over(self, transport: str) -> int:
        if self.slice_bytes is not None:
            return self.slice_bytes
        return _SLICE_BYTES.get(transport, _SLICE_BYTES["tcp"])

    @property
    def tcp_rails(self) -> tuple[str, ...]:
        """Rails that are IP addresses. The others name RDMA ports."""
        return tuple(rail for rail in self.rails if _is_ip(rail))

    @property
    def rdma_rails(self) -> tuple[str, ...]:
        return tuple(rail for rail in self.rails if not _is_ip(rail))


def _is_ip(rail: str) -> bool:
    try:
        ipaddress.ip_address(rail)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTimeout:
    """Time limit of transfers: an allowance for stalls plus the time of the bytes at the slowest acceptable rate."""

    base_s: float = 10.0
    """Allowance for connecting, retries and a briefly stopped peer."""
    slowest_bytes_s: float = 50e6
    """Slowest acceptable rate: half the capacity of a 1 Gbit/s link."""

    def __post_init__(self) -> None:
        if self.base_s <= 0 or self.slowest_bytes_s <= 0:
            raise ConfigError("the transfer timeout and the slowest rate must be above 0")

    def deadline_s(self, nbytes: int) -> float:
        """Returns the seconds allowed for `nbytes`, which include the bytes queued before the transfer."""
        return self.base_s + nbytes / self.slowest_bytes_s


@dataclass(slots=True, eq=False)
class FaultPlan:
    """Injected faults. Counters decrease as faults happen and may be raised again at any time."""

    corrupt_writes: int = 0
    """Number of WRITEs, per peer and batch, in which one byte is flipped. The flip precedes the sender's checksum, as
    with bad memory, so block verification must detect it."""
    drop_connections: int = 0
    """Number of submissions, per peer and batch, that fail with PeerLost before anything is sent."""
    held: bool = False
    """While true, no submitted part is started."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def any(self) -> bool:
        """True if a fault is pending."""
        return bool(self.corrupt_writes or self.drop_connections or self.held)

    def take_corrupt_write(self) -> bool:
        with self._lock:
            self.corrupt_writes -= (taken := self.corrupt_writes > 0)
        return taken

    def take_drop(self) -> bool:
        with self._lock:
            self.drop_connections -= (taken := self.drop_connections > 0)
        return taken


_DEFAULTS = TransferOptions()
_TIMEOUT = TransferTimeout()


@dataclass(frozen=True, kw_only=True)
class TransferConfig(TlsConfig):
    """Flags mixed into the configuration of store nodes and workers; `moonserve serve` passes them on."""

    transports: tuple[str, ...] = option(
        _DEFAULTS.transports, help="transports for KV, in order of preference: shm, rdma, tcp"
    )
    transfer_rails: tuple[str, ...] = option(
        (),
        help="local IP addresses and RDMA ports (mlx5_0:1) that carry KV; discovered if not given",
    )
    transfer_streams: int | None = option(
        None, help="TCP connections per pair of rails; default: 1, or 4 where a round trip takes 2 ms or more"
    )
    transfer_checksums: bool = option(
        _DEFAULTS.checksums, help="checksum every slice of KV in transit, in addition to the blocks' checksums"
    )
    transfer_max_endpoints: int = option(
        _DEFAULTS.max_endpoints, help="maximum number of KV connections that one process keeps open"
    )
    transfer_tls: bool = option(
        True, help="with --tls-certificate: also encrypt KV over tcp (TLS 1.3; rdma cannot be encrypted)"
    )

    def transfer_options(self, host: str) -> TransferOptions:
        """Returns the options of a process that publishes the address `host`. Raises ConfigError."""
        return TransferOptions(
            host=host,
            transports=self.transports,
            rails=self.transfer_rails,
            streams=self.transfer_streams,
            checksums=self.transfer_checksums,
            max_endpoints=self.transfer_max_endpoints,
            tls=self.transfer_tls_files(),
        )

    def transfer_tls_files(self) -> TlsFiles | None:
        """Returns the TLS files for KV; None: KV is not encrypted. Raises ConfigError."""
        return self.tls_files() if self.transfer_tls else None


@dataclass(frozen=True, kw_only=True)
class TransferTimeoutConfig:
    """Flags mixed into the configuration of processes that submit transfers themselves."""

    transfer_timeout_s: float = option(
        _TIMEOUT.base_s,
        help="time limit of a KV transfer, in addition to the time of its bytes at the slowest rate",
    )
    transfer_slowest_rate: int = option(
        int(_TIMEOUT.slowest_bytes_s),
        help="slowest acceptable rate of a KV transfer, in bytes per second; slower transfers fail",
        unit="bytes",
    )

    def transfer_timeout(self) -> TransferTimeout:
        """Returns the configured time limit. Raises ConfigError."""
        return TransferTimeout(base_s=self.transfer_timeout_s, slowest_bytes_s=self.transfer_slowest_rate)
