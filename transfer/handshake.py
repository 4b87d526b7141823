"""Both ends prove that they know the cluster token before anything else is read.

initiator → HELLO(version, nonce)          target → CHALLENGE(status, version, nonce)
initiator → PROOF(hmac, wanted instance)   target → WELCOME(status, hmac)

Every proof is HMAC-SHA256 over a role, both nonces and the target's instance, compared in constant
time. The instance is random per process: whoever took over a dead peer's port is not taken for it.
What follows the handshake is neither encrypted nor signed; the network is the cluster's own.
"""

from __future__ import annotations

import hmac
import secrets
import struct

from protocol.errors import Incompatible, PeerLost, Unauthenticated
from transfer.base import Credentials
from transfer.connection import Connection
from transfer.frames import Code, ProtocolViolation, error_of

PROTOCOL_VERSION = 1
INSTANCE_BYTES = 16
_MAGIC = b"MOONXFER"
_NONCE_BYTES = 32
_HELLO = struct.Struct("<8sH32s")
_CHALLENGE = struct.Struct("<8sBH32s")
_PROOF = struct.Struct("<32s16s")
_WELCOME = struct.Struct("<B32s")
_NO_PROOF = bytes(32)


def initiate(connection: Connection, credentials: Credentials, instance: bytes) -> None:
    """Raises Unauthenticated, Incompatible, or PeerLost (another incarnation answered)."""
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.send([_HELLO.pack(_MAGIC, PROTOCOL_VERSION, mine)])
    magic, status, version, theirs = _CHALLENGE.unpack(connection.receive_bytes(_CHALLENGE.size))
    if magic != _MAGIC:
        raise ProtocolViolation("the peer is no transfer engine")
    if version != PROTOCOL_VERSION or status != Code.OK:
        raise _other_version(version)
    key = credentials.cluster_token
    proof = _proof(key, b"initiator", mine, theirs, instance)
    connection.send([_PROOF.pack(proof, instance)])
    status, answer = _WELCOME.unpack(connection.receive_bytes(_WELCOME.size))
    if status != Code.OK:
        raise _refused(status)
    if not hmac.compare_digest(answer, _proof(key, b"target", mine, theirs, instance)):
        raise Unauthenticated("the peer does not know the cluster token")


def respond(connection: Connection, credentials: Credentials) -> None:
    """The same errors, after the initiator has been told."""
    magic, version, theirs = _HELLO.unpack(connection.receive_bytes(_HELLO.size))
    if magic != _MAGIC:
        raise ProtocolViolation("no handshake")
    status = Code.OK if version == PROTOCOL_VERSION else Code.INCOMPATIBLE
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.send([_CHALLENGE.pack(_MAGIC, status, PROTOCOL_VERSION, mine)])
    if status != Code.OK:
        raise _other_version(version)
    proof, instance = _PROOF.unpack(connection.receive_bytes(_PROOF.size))
    key = credentials.cluster_token
    status = Code.OK
    if not hmac.compare_digest(proof, _proof(key, b"initiator", theirs, mine, instance)):
        status = Code.UNAUTHENTICATED
    elif instance != credentials.instance:
        status = Code.PEER_LOST
    if status != Code.OK:
        connection.send([_WELCOME.pack(status, _NO_PROOF)])
        raise _refused(status)
    answer = _proof(key, b"target", theirs, mine, instance)
    connection.send([_WELCOME.pack(Code.OK, answer)])


def _proof(key: bytes, role: bytes, initiator: bytes, target: bytes, instance: bytes) -> bytes:
    return hmac.digest(key, b"moonserve transfer " + role + initiator + target + instance, "sha256")


def _other_version(version: int) -> Incompatible:
    return Incompatible(f"the peer speaks transfer protocol {version}, this is {PROTOCOL_VERSION}")


def _refused(status: int) -> Exception:
    if status == Code.UNAUTHENTICATED:
        return Unauthenticated("wrong cluster token")
    if status == Code.PEER_LOST:
        return PeerLost("the peer has been restarted; this is another incarnation")
    try:
        return error_of(Code(status), "refused in the handshake")
    except (KeyError, ValueError):
        return ProtocolViolation("unknown status in the handshake")
