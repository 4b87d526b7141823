"""Handshake in which both ends prove that they know the cluster token before anything else is read.

initiator → HELLO(version, flags, nonce)   target → CHALLENGE(status, version, flags, nonce)
initiator → PROOF(hmac, wanted instance)   target → WELCOME(status, connection id, hmac)

Every proof is HMAC-SHA256 over a role, flags, both nonces, the target's instance and the connection id, compared in
constant time. Slices carry checksums if either end's flags request them. The instance is random per process, so a
process that reuses a dead peer's port is not mistaken for it. Frames after the handshake are not signed: without TLS
the network must belong to the cluster alone.
"""

import hmac
import secrets
import struct
from dataclasses import dataclass

from moonserve.protocol.errors import Incompatible, PeerLost, Unauthenticated
from moonserve.transfer.tcp.connection import Connection
from moonserve.transfer.tcp.frames import Code, ProtocolViolation, error_of
from moonserve.transfer.transport_interface import Credentials

PROTOCOL_VERSION = 4
INSTANCE_BYTES = 16
_MAGIC = b"MOONXFER"
_NONCE_BYTES = 32
_CHECKSUMS = 1
_HELLO = struct.Struct("<8sHB32s")
_HELLO_HEAD = struct.Struct("<8sH")
_CHALLENGE = struct.Struct("<8sBHB32s")
_PROOF = struct.Struct("<32s16s")
_WELCOME = struct.Struct("<BQ32s")
_NO_PROOF = bytes(32)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Result of the handshake, known to both ends."""

    connection_id: int
    checksums: bool


def initiate(connection: Connection, credentials: Credentials, instance: bytes, *, checksums: bool) -> Agreement:
    """Runs the initiator's side. Raises Unauthenticated, Incompatible, or PeerLost (also if another incarnation
    answered)."""
    mine = secrets.token_bytes(_NONCE_BYTES)
    hello = _HELLO.pack(_MAGIC, PROTOCOL_VERSION, checksums, mine)
    connection.send(hello)
    their_flags, theirs = _receive_challenge(connection, hello)
    flags = (checksums | their_flags) & _CHECKSUMS
    proof = _Proof(credentials.cluster_token, flags, mine, theirs, instance)
    connection.send(_PROOF.pack(proof.of(b"initiator"), instance))
    status, connection_id, answer = _WELCOME.unpack(connection.receive_bytes(_WELCOME.size))
    if status != Code.OK:
        raise _refused(status)
    if not hmac.compare_digest(answer, proof.of(b"target", connection_id)):
        raise Unauthenticated("the peer does not know the cluster token")
    return Agreement(connection_id, bool(flags))


def _receive_challenge(connection: Connection, hello: bytes) -> tuple[int, bytes]:
    """Receives the target's flags and nonce. The head is checked first: an echo, or another initiator, answers with the
    shorter HELLO and then sends nothing more."""
    head = connection.receive_bytes(_HELLO_HEAD.size)
    if not head.startswith(_MAGIC):
        raise ProtocolViolation("the peer is not a transfer engine")
    if hello.startswith(head):
        raise ProtocolViolation("the peer echoes the handshake or is itself an initiator")
    rest = connection.receive_bytes(_CHALLENGE.size - len(head))
    _, status, version, their_flags, theirs = _CHALLENGE.unpack(head + rest)
    if version != PROTOCOL_VERSION or status != Code.OK:
        raise _other_version(version)
    return their_flags, theirs


def respond(connection: Connection, credentials: Credentials, connection_id: int, *, checksums: bool) -> Agreement:
    """Runs the target's side. Raises the same errors; the initiator is notified first, unless it sent no handshake."""
    magic, version, their_flags, theirs = _HELLO.unpack(connection.receive_bytes(_HELLO.size))
    if magic != _MAGIC:
        raise ProtocolViolation("the connection does not begin with a handshake")
    status = Code.OK if version == PROTOCOL_VERSION else Code.INCOMPATIBLE
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.send(_CHALLENGE.pack(_MAGIC, status, PROTOCOL_VERSION, checksums, mine))
    if status != Code.OK:
        raise _other_version(version)
    flags = (checksums | their_flags) & _CHECKSUMS
    proof, instance = _PROOF.unpack(connection.receive_bytes(_PROOF.size))
    expected = _Proof(credentials.cluster_token, flags, theirs, mine, instance)
    if not hmac.compare_digest(proof, expected.of(b"initiator")):
        status = Code.UNAUTHENTICATED
    elif instance != credentials.instance:
        status = Code.PEER_LOST
    if status != Code.OK:
        connection.send(_WELCOME.pack(status, 0, _NO_PROOF))
        raise _refused(status)
    connection.send(_WELCOME.pack(Code.OK, connection_id, expected.of(b"target", connection_id)))
    return Agreement(connection_id, bool(flags))


@dataclass(frozen=True, slots=True)
class _Proof:
    """Proof input: everything that both ends must agree on."""

    key: bytes
    flags: int
    initiator: bytes
    target: bytes
    instance: bytes

    def of(self, role: bytes, connection_id: int = 0) -> bytes:
        fixed = struct.pack("<BQ", self.flags, connection_id)
        message = b"moonserve transfer " + role + fixed + self.initiator + self.target
        return hmac.digest(self.key, message + self.instance, "sha256")


def _other_version(version: int) -> Incompatible:
    return Incompatible(f"the peer uses transfer protocol {version}, this process {PROTOCOL_VERSION}")


def _refused(status: int) -> Exception:
    if status == Code.UNAUTHENTICATED:
        return Unauthenticated("wrong cluster token")
    if status == Code.PEER_LOST:
        return PeerLost("the peer has been restarted; this is another incarnation")
    try:
        return error_of(Code(status), "refused in the handshake")
    except (KeyError, ValueError):
        return ProtocolViolation("unknown status in the handshake")
