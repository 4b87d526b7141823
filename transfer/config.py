"""The flags of every process that moves KV, and the options that they make."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from protocol.config import option
from protocol.errors import ConfigError
from protocol.tls import TlsConfig, TlsFiles, files_of
from transfer.options import TransferOptions
from transfer.patience import Patience

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
    transfer_copy_threads: int = option(
        _DEFAULTS.copy_threads, help="threads that share a large copy within a host"
    )
    transfer_max_endpoints: int = option(
        _DEFAULTS.max_endpoints, help="connections for KV that one process keeps open"
    )
    transfer_topology: str | None = option(
        None, help="JSON file that says which rails are near which memory (see moonserve doctor)"
    )
    transfer_tls: bool = option(
        True, help="with --tls-certificate: encrypt KV over tcp, too (TLS 1.3; rdma cannot be)"
    )
    transfer_tls_certificate: str | None = option(
        None,
        help="PEM file; with key and authority, KV over tcp is encrypted by it, not by --tls-certificate",
    )
    transfer_tls_key: str | None = option(None, help="PEM file of the certificate's key")
    transfer_tls_authority: str | None = option(
        None, help="PEM file of the authority that signed every peer's certificate"
    )

    def transfer_options(self, host: str) -> TransferOptions:
        """`host` is the address that the process publishes. Raises ConfigError."""
        files = self.transfer_tls_files()
        return TransferOptions(
            host=host,
            transports=self.transports,
            rails=self.transfer_rails,
            streams=self.transfer_streams,
            checksums=self.transfer_checksums,
            copy_threads=self.transfer_copy_threads,
            max_endpoints=self.transfer_max_endpoints,
            topology=_path(self.transfer_topology),
            tls_certificate=None if files is None else files.certificate,
            tls_key=None if files is None else files.key,
            tls_authority=None if files is None else files.authority,
        )

    def transfer_tls_files(self) -> TlsFiles | None:
        """What encrypts KV; None: nothing does. Raises ConfigError."""
        own = files_of(
            self.transfer_tls_certificate, self.transfer_tls_key, self.transfer_tls_authority
        )
        if own is not None and not self.transfer_tls:
            raise ConfigError("--transfer-tls-certificate and --no-transfer-tls exclude each other")
        return (own or self.tls_files()) if self.transfer_tls else None


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


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
