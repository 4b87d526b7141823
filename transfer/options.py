"""What a transfer engine can be told; `transfer.config` makes flags of most fields."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError
from protocol.tls import TlsFiles, files_of

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
    topology: Path | None = None
    """JSON file that replaces what sysfs tells about memory locations and rails."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_authority: Path | None = None
    """All three or none: TLS on tcp, both ends verified against the authority."""

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
        if self.tls_files is not None and "rdma" in self.transports:
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

    @property
    def tls_files(self) -> TlsFiles | None:
        """Raises ConfigError when only some are given."""
        return files_of(self.tls_certificate, self.tls_key, self.tls_authority)

    @property
    def tls(self) -> bool:
        return self.tls_certificate is not None


def _is_ip(rail: str) -> bool:
    try:
        ipaddress.ip_address(rail)
    except ValueError:
        return False
    return True
