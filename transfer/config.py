"""Configuration of a transfer engine: options, flags, time limits and injected faults."""

from __future__ import annotations

import ipaddress
import threading
from dataclasses import dataclass, field

from protocol.config import option
from protocol.errors import ConfigError
from protocol.tls import TlsConfig, TlsFiles

_SLICE_BYTES = {"shm": 16 << 20, "tcp": 4 << 20, "rdma": 16 << 20}
"""Within a host cutting gains nothing, still short enough to take turns; over rdma a write asks for a grant per
slice, and both pairs are to have one always (LOG.md)."""
_HASHED_TCP_SLICE_BYTES = 2 << 20
"""What was hashed is sent, and what came is hashed, while it is still near."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """Defaults fit one machine with its store and workers; sizes are in bytes."""

    host: str = "127.0.0.1"
    """The address that peers can reach; the one TCP rail when `rails` is empty."""
    transports: tuple[str, ...] = ("shm", "tcp")
    """In order of preference."""
    rails: tuple[str, ...] = ()
    """TCP: local addresses, one rail each. RDMA: device ports ("mlx5_0:1"). Empty: found out."""
    streams: int = 1
    """TCP connections per pair of rails; more help on links where one cannot fill the window."""
    checksums: bool = True
    """XXH3-64 of every slice, made by the sender and verified by the receiver; what is copied within a
    host is compared with its source instead."""
    slice_bytes: int | None = None
    """Transfers are cut into slices of at most this. None: what suits the transport."""
    max_in_flight_bytes: int = 8 << 20
    """Per connection: how far requests run ahead of their answers."""
    copy_threads: int = 1
    """Threads that share a large copy within the host; more than spare cores does harm."""
    max_endpoints: int = 512
    """Live connections that this engine has opened; the idle ones are closed first (SIEVE)."""
    tls: TlsFiles | None = None
    """Encrypts tcp, both ends verified against the authority."""

    def __post_init__(self) -> None:
        if not self.transports:
            raise ConfigError("no transports: choose from shm, tcp, rdma")
        for name in (
            "streams",
            "slice_bytes",
            "max_in_flight_bytes",
            "copy_threads",
            "max_endpoints",
        ):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"transfer {name.replace('_', ' ')} must be at least 1")
        if self.tls is not None and "rdma" in self.transports:
            raise ConfigError(
                "rdma cannot be encrypted: take it out of --transports, or give --no-transfer-tls where its network is "
                "the cluster's own"
            )

    def slice_bytes_over(self, transport: str) -> int:
        if self.slice_bytes is not None:
            return self.slice_bytes
        if transport == "tcp" and self.checksums:
            return _HASHED_TCP_SLICE_BYTES
        return _SLICE_BYTES.get(transport, _SLICE_BYTES["tcp"])

    @property
    def tcp_rails(self) -> tuple[str, ...]:
        """The rails that are IP addresses; the others name RDMA ports."""
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


@dataclass(slots=True, eq=False)
class FaultPlan:
    """Counters run down as faults happen; they may be raised again at any time."""

    corrupt_writes: int = 0
    """One byte is flipped in this many WRITEs before the sender's checksum is made, as bad memory would:
    the verification of the blocks must notice (per peer and batch)."""
    drop_connections: int = 0
    """This many batches lose their connection and fail with PeerLost."""
    held: bool = False
    """No batch is begun while it is set."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def any(self) -> bool:
        """Something is still to go wrong."""
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
_PATIENCE = Patience()


@dataclass(frozen=True, kw_only=True)
class TransferConfig(TlsConfig):
    """Mixed into the configuration of store nodes and workers; `moonserve serve` passes them on."""

    transports: tuple[str, ...] = option(
        _DEFAULTS.transports, help="transports for KV, in order of preference: shm, rdma, tcp"
    )
    transfer_rails: tuple[str, ...] = option(
        (),
        help="ways out of this host for KV: IP addresses, RDMA ports (mlx5_0:1); found out when not given",
    )
    transfer_streams: int = option(
        _DEFAULTS.streams, help="TCP connections per pair of rails; more than 1 pays on long links"
    )
    transfer_checksums: bool = option(
        _DEFAULTS.checksums, help="checksum every slice of KV on its way, besides the blocks' own"
    )
    transfer_copy_threads: int = option(_DEFAULTS.copy_threads, help="threads that share a large copy within a host")
    transfer_max_endpoints: int = option(_DEFAULTS.max_endpoints, help="connections for KV that one process keeps open")
    transfer_tls: bool = option(True, help="with --tls-certificate: encrypt KV over tcp, too (TLS 1.3; rdma cannot be)")

    def transfer_options(self, host: str) -> TransferOptions:
        """`host` is the address that the process publishes. Raises ConfigError."""
        return TransferOptions(
            host=host,
            transports=self.transports,
            rails=self.transfer_rails,
            streams=self.transfer_streams,
            checksums=self.transfer_checksums,
            copy_threads=self.transfer_copy_threads,
            max_endpoints=self.transfer_max_endpoints,
            tls=self.transfer_tls_files(),
        )

    def transfer_tls_files(self) -> TlsFiles | None:
        """What encrypts KV; None: nothing does. Raises ConfigError."""
        return self.tls_files() if self.transfer_tls else None


@dataclass(frozen=True, kw_only=True)
class PatienceConfig:
    """Mixed into the configuration of processes that submit transfers by themselves."""

    transfer_timeout_s: float = option(
        _PATIENCE.base_s,
        help="seconds that KV may take, besides what its bytes take at the slowest rate",
    )
    transfer_slowest_rate: int = option(
        int(_PATIENCE.slowest_bytes_s),
        help="bytes per second that are slow but not too slow; below it a transfer fails",
        unit="bytes",
    )

    def transfer_patience(self) -> Patience:
        """Raises ConfigError."""
        return Patience(base_s=self.transfer_timeout_s, slowest_bytes_s=self.transfer_slowest_rate)
