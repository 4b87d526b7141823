"""What an engine shows its peers over TLS, and whom it believes: the operator's three files.

Its rule: whoever the authority has signed belongs to the cluster, so the authority must be the cluster's
own; a name is not asked for, but a certificate that lists IP addresses is only believed at these. Files
that cannot work are refused at start, not at the first transfer. Knows no connections.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError
from transfer.options import TransferOptions


@dataclass(frozen=True, slots=True)
class Certificates:
    """Both roles of one engine. TLS 1.3 only, and each end asks the other for its certificate."""

    initiator: ssl.SSLContext
    target: ssl.SSLContext


def load(options: TransferOptions) -> Certificates | None:
    """None when TLS is not configured. Raises ConfigError for files that no peer could believe."""
    files = (options.tls_certificate, options.tls_key, options.tls_authority)
    certificate, key, authority = files
    if certificate is None or key is None or authority is None:
        return None
    for path in (certificate, key, authority):
        _require_readable(path)
    certificates = Certificates(
        _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, authority),
        _context(ssl.PROTOCOL_TLS_SERVER, certificate, key, authority),
    )
    _rehearse(certificates, certificate, authority)
    return certificates


def _require_readable(path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"TLS file {path}: {error.strerror}; give PEM files that this process can read"
        ) from error


def _context(role: ssl._SSLMethod, certificate: Path, key: Path, authority: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(role)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an intermediate may be the authority
    if role is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # connections live long: nothing is resumed
    try:
        context.load_verify_locations(authority)
    except ssl.SSLError as error:
        raise ConfigError(f"TLS authority {authority} holds no PEM certificate") from error
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except ssl.SSLError as error:
        raise ConfigError(
            f"TLS certificate {certificate} and key {key} do not belong together or are not PEM "
            f"({_reason(error)}); give the key that the certificate was made with"
        ) from error
    return context


def _refuse_password() -> str:
    raise ConfigError("the TLS key is protected by a password; give one without (openssl pkey)")


def _rehearse(certificates: Certificates, certificate: Path, authority: Path) -> None:
    """This engine meets itself, in memory, as its peers will: what they would refuse shows here."""
    wires = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        certificates.initiator.wrap_bio(wires[0], wires[1]),
        certificates.target.wrap_bio(wires[1], wires[0], server_side=True),
    )
    for end in (*ends, *ends):  # hello, its answer, and each one's proof
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"peers would refuse the TLS certificate {certificate}: {error.verify_message}; "
                f"it must be valid now, signed by {authority}, and for both clients and servers"
            ) from error
        except ssl.SSLError as error:
            raise ConfigError(f"TLS certificate {certificate}: {_reason(error)}") from error


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
