"""Mutual TLS between the cluster's processes: the operator's three files and the checks of peers' certificates.

Every certificate of the authority belongs to the cluster, so the authority must be the cluster's own. A certificate
that lists IP addresses is accepted only at these addresses. gRPC requires more: the dialled address must be listed,
unless this process's own certificate lists the name `CLUSTER_NAME`, which is then expected of every peer instead.
Unusable files are refused at start, and no file is generated. The module does not know connections.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonserve.protocol.errors import ConfigError, MoonserveError, PeerLost, Unauthenticated
from moonserve.protocol.process.config import option

if TYPE_CHECKING:  # importing grpc takes a third of the import of the transfer engine, which works without it
    import grpc

CLUSTER_NAME = "moonserve"
"""DNS name that makes certificates valid at any address, if all certificates of the cluster list it."""

IN_HANDSHAKE = "broke in its handshake, perhaps because the peer trusts another --tls-authority"
"""Text for a connection lost in its handshake: a peer cannot always report that it refuses a certificate."""

CLOSE_TIMEOUT_S = 0.5
"""Time that an end which closes a connection waits for the other end's closing message. Callers in threads only read
during calls, so each of them would delay the stop of a server by asyncio's default of 30 s."""

_REFUSED_BY_GRPC = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)")
_ALERTS_ABOUT_OWN_CERTIFICATE = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: a certificate, its key, and the authority that signed every peer's certificate."""

    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """TLS options of every process's configuration. `moonserve serve` passes them on."""

    tls_certificate: str | None = option(
        None,
        help="PEM file of the process's certificate; with key and authority, traffic between processes is encrypted "
        "and both ends show a certificate (docs/security.md)",
    )
    tls_key: str | None = option(None, help="PEM file of the certificate's key")
    tls_authority: str | None = option(None, help="PEM file of the authority that signed every process's certificate")

    def tls_files(self) -> TlsFiles | None:
        """Returns the files, or None without TLS. Raises ConfigError if only some of the three are given."""
        return files_of(self.tls_certificate, self.tls_key, self.tls_authority)

    def tls(self) -> Certificates | None:
        """Returns the loaded certificates, or None without TLS. Raises ConfigError for unusable files."""
        files = self.tls_files()
        return None if files is None else load_certificates(files)


def files_of(certificate: Path | str | None, key: Path | str | None, authority: Path | str | None) -> TlsFiles | None:
    """Returns the three files, or None if none is given. Raises ConfigError if only some are given."""
    if certificate is None and key is None and authority is None:
        return None
    if certificate is None or key is None or authority is None:
        raise ConfigError("TLS needs a certificate, a key and an authority; give all three")
    return TlsFiles(Path(certificate), Path(key), Path(authority))


def files_in(environ: Mapping[str, str]) -> TlsFiles | None:
    """Returns the files named in the environment, for commands without a configuration class. Raises ConfigError."""
    names = ("CERTIFICATE", "KEY", "AUTHORITY")
    return files_of(*(environ.get(f"MOONSERVE_TLS_{name}") for name in names))


@dataclass(frozen=True, slots=True)
class Certificates:
    """TLS contexts of one process, for both roles. Both ends require certificates. TLS 1.3, or from 1.2 on in gRPC."""

    files: TlsFiles
    initiator: ssl.SSLContext
    target: ssl.SSLContext
    names_cluster: bool
    """True if this process's certificate lists `CLUSTER_NAME`."""

    def grpc_server(self) -> grpc.ServerCredentials:
        """Returns server credentials that refuse clients without a certificate of the authority."""
        import grpc

        certificate, key, authority = self._pems()
        return grpc.ssl_server_credentials([(key, certificate)], root_certificates=authority, require_client_auth=True)

    def grpc_channel(self) -> grpc.ChannelCredentials:
        import grpc

        certificate, key, authority = self._pems()
        return grpc.ssl_channel_credentials(authority, key, certificate)

    @property
    def grpc_options(self) -> list[tuple[str, str]]:
        """Channel options: the name that is expected of the peer, if it is not the address."""
        return [("grpc.ssl_target_name_override", CLUSTER_NAME)] if self.names_cluster else []

    def _pems(self) -> tuple[bytes, bytes, bytes]:
        files = self.files
        return tuple(path.read_bytes() for path in (files.certificate, files.key, files.authority))  # type: ignore[return-value]


class _Socket(ssl.SSLSocket):
    """TLS socket that closes itself if the peer disconnects before the handshake; `wrap_socket` leaves that to GC."""

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError as error:
            self.close()
            raise ConnectionResetError(errno.ECONNRESET, "the peer has disconnected") from error


def load_certificates(files: TlsFiles) -> Certificates:
    """Loads the certificates and tests them. Raises ConfigError for files that peers would refuse."""
    for path in (files.certificate, files.key, files.authority):
        _require_readable(path)
    initiator = _context(ssl.PROTOCOL_TLS_CLIENT, files)
    target = _context(ssl.PROTOCOL_TLS_SERVER, files)
    shown = _self_test(initiator, target, files)
    names_cluster = ("DNS", CLUSTER_NAME) in shown.get("subjectAltName", ())
    return Certificates(files, initiator, target, names_cluster)


def require_address(certificate: Mapping[str, Any] | None, peer_ip: str) -> None:
    """Raises Unauthenticated if `certificate` (from `getpeercert`) lists IP addresses, but not `peer_ip`."""
    names = (certificate or {}).get("subjectAltName", ())
    listed = {ipaddress.ip_address(value) for kind, value in names if kind == "IP Address"}
    if listed and ipaddress.ip_address(peer_ip) not in listed:
        raise Unauthenticated(
            f"the peer at {peer_ip} shows a TLS certificate for {', '.join(sorted(map(str, listed)))} only"
        )


def tls_error(error: ssl.SSLError) -> MoonserveError:
    """Translates a TLS error to Unauthenticated if a certificate was refused, otherwise to PeerLost."""
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return Unauthenticated(f"the peer's TLS certificate is refused: {error.verify_message}")
    if any(word in reason for word in _ALERTS_ABOUT_OWN_CERTIFICATE):
        return Unauthenticated(f"the peer refuses this process's TLS certificate: {_in_words(reason)}")
    return PeerLost(f"the peer does not speak TLS 1.3: {_in_words(reason)}")


def grpc_failure(details: str) -> MoonserveError | None:
    """Translates gRPC's message about a failed connection if TLS is the reason; otherwise returns None."""
    if (refused := _REFUSED_BY_GRPC.search(details)) is not None:
        return Unauthenticated(f"the peer's TLS certificate is refused: {refused[1].strip()}")
    if "Hostname Verification Check failed" in details:
        return Unauthenticated(
            "the peer's TLS certificate is refused: it must list the dialled address (subjectAltName IP:…), or every "
            f"certificate of the cluster must list DNS:{CLUSTER_NAME}"
        )
    if "WRONG_VERSION_NUMBER" in details:
        return PeerLost("this process speaks TLS and the peer does not: start the peer with --tls-certificate, …")
    if "failed to connect" in details and "Socket closed" in details:
        return PeerLost(
            "the peer closed the connection at once: perhaps it speaks TLS and this process does not, or it trusts "
            "another --tls-authority; see its log"
        )
    return None


def _require_readable(path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS file {path}: {error.strerror}; give PEM files that this process can read") from error


def _context(role: ssl._SSLMethod, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(role)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = _Socket
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an intermediate may be the authority
    if role is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # connections are long-lived, so sessions are never resumed
    try:
        context.load_verify_locations(files.authority)
    except ssl.SSLError as error:
        raise ConfigError(f"TLS authority {files.authority} contains no PEM certificate; give its PEM file") from error
    try:
        context.load_cert_chain(files.certificate, files.key, password=_refuse_password)
    except ssl.SSLError as error:
        raise ConfigError(
            f"TLS certificate {files.certificate} and key {files.key} do not belong together or are not PEM "
            f"({_reason(error)}); give the key from which the certificate was made"
        ) from error
    return context


def _refuse_password() -> str:
    raise ConfigError("the TLS key is protected by a password; give a key without one (openssl pkey removes it)")


def _self_test(initiator: ssl.SSLContext, target: ssl.SSLContext, files: TlsFiles) -> dict[str, Any]:
    """Runs a handshake of this process with itself in memory and returns its certificate.

    Raises ConfigError for what its peers would refuse."""
    wires = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        initiator.wrap_bio(wires[0], wires[1]),
        target.wrap_bio(wires[1], wires[0], server_side=True),
    )
    for end in (*ends, *ends):  # hello, its answer, and the proof of each end
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"peers would refuse the TLS certificate {files.certificate}: {error.verify_message}; "
                f"it must be valid now, signed by {files.authority}, and for both clients and servers"
            ) from error
        except ssl.SSLError as error:
            raise ConfigError(f"TLS certificate {files.certificate}: {_reason(error)}") from error
    return dict(ends[0].getpeercert() or {})


def _reason(error: ssl.SSLError) -> str:
    return _in_words(error.reason or str(error))


def _in_words(reason: str) -> str:
    return reason.lower().replace("_", " ")
