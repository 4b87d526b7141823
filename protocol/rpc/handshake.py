"""Handshake of socket RPC: both ends prove that they know the cluster token, and the server lists its methods.

client → HELLO(version, nonce)     server → CHALLENGE(status, version, nonce)
client → PROOF(hmac)               server → WELCOME(status, size of the method list, hmac), the method list

A proof is an HMAC-SHA256 over a role, both nonces and, from the server, the method list. Proofs are compared in
constant time. Each end takes complete messages of `needed` bytes and returns the bytes to send. The module knows no
sockets and no randomness. Traffic after the handshake is not signed: the network is the cluster's own, as for gRPC.
"""

import hmac
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum

from moonserve.protocol.errors import Incompatible, MoonserveError, Unauthenticated
from moonserve.protocol.rpc.frames import MalformedFrame

PROTOCOL_VERSION = 1
NONCE_BYTES = 32
# Enough for a hundred methods with long names. It bounds the memory for a peer that has not proven itself yet.
MAX_METHOD_LIST_BYTES = 64 * 1024

_MAGIC = b"MOONLEAN"
_HELLO = struct.Struct("<8sH32s")
_CHALLENGE = struct.Struct("<8sBH32s")
_PROOF = struct.Struct("<32s")
_WELCOME = struct.Struct("<BI32s")


class HandshakeStatus(IntEnum):
    OK = 0
    INCOMPATIBLE = 1
    UNAUTHENTICATED = 2


def advance(handshake: "Initiator | Responder", arrived: bytearray) -> bytes:
    """Processes the complete messages in `arrived`, removes them from it and returns the bytes to send."""
    answer = b""
    while 0 < handshake.needed <= len(arrived):
        message = bytes(arrived[: handshake.needed])
        del arrived[: len(message)]
        answer += handshake.receive(message)
    return answer


class Initiator:
    """Client end of the handshake. `needed` is the size of the server's next message; 0 means that it is complete.

    `receive` raises Unauthenticated, Incompatible or MalformedFrame."""

    def __init__(self, cluster_token: str, nonce: bytes) -> None:
        self.hello = _HELLO.pack(_MAGIC, PROTOCOL_VERSION, nonce)
        self.needed = _CHALLENGE.size
        self.methods: tuple[str, ...] = ()
        """Methods of the server, in its numbering. Valid when `needed` is 0."""
        self._token = cluster_token.encode()
        self._nonces = nonce
        self._welcome = b""
        self._receive: Callable[[bytes], bytes] = self._on_challenge

    def receive(self, message: bytes) -> bytes:
        return self._receive(message)

    def _on_challenge(self, message: bytes) -> bytes:
        magic, status, version, nonce = _CHALLENGE.unpack(message)
        if magic != _MAGIC:
            raise MalformedFrame("the peer is not a server of socket RPC")
        if status != HandshakeStatus.OK or version != PROTOCOL_VERSION:
            raise _other_version(version)
        self._nonces += nonce
        self.needed, self._receive = _WELCOME.size, self._on_welcome
        return _proof(self._token, b"client", self._nonces)

    def _on_welcome(self, message: bytes) -> bytes:
        status, list_bytes, self._welcome = _WELCOME.unpack(message)
        if status == HandshakeStatus.UNAUTHENTICATED:
            raise Unauthenticated("wrong cluster token")
        if status != HandshakeStatus.OK or not 0 < list_bytes <= MAX_METHOD_LIST_BYTES:
            raise MalformedFrame("the last message of the handshake is malformed")
        self.needed, self._receive = list_bytes, self._on_methods
        return b""

    def _on_methods(self, message: bytes) -> bytes:
        expected = _proof(self._token, b"server", self._nonces + message)
        if not hmac.compare_digest(self._welcome, expected):
            raise Unauthenticated("the peer does not know the cluster token")
        self.methods = tuple(message.decode().split("\n"))
        self.needed = 0
        return b""


class Responder:
    """Server end of the handshake. It does not raise: a refusal is sent to the client and kept in `refusal`."""

    def __init__(self, cluster_token: str, methods: Sequence[str], nonce: bytes) -> None:
        self.needed = _HELLO.size
        self.refusal: MoonserveError | None = None
        self._token = cluster_token.encode()
        self._method_list = "\n".join(methods).encode()
        self._nonce = nonce
        self._nonces = b""
        self._receive: Callable[[bytes], bytes] = self._on_hello

    def receive(self, message: bytes) -> bytes:
        return self._receive(message)

    def _on_hello(self, message: bytes) -> bytes:
        magic, version, nonce = _HELLO.unpack(message)
        if magic != _MAGIC:
            self._refuse(MalformedFrame("the client did not begin with a handshake"))
            return b""
        self._nonces = nonce + self._nonce
        self.needed, self._receive = _PROOF.size, self._on_proof
        status = HandshakeStatus.OK
        if version != PROTOCOL_VERSION:
            status = HandshakeStatus.INCOMPATIBLE
            self._refuse(_other_version(version))
        return _CHALLENGE.pack(_MAGIC, status, PROTOCOL_VERSION, self._nonce)

    def _on_proof(self, message: bytes) -> bytes:
        if not hmac.compare_digest(message, _proof(self._token, b"client", self._nonces)):
            self._refuse(Unauthenticated("wrong cluster token"))
            return _WELCOME.pack(HandshakeStatus.UNAUTHENTICATED, 0, bytes(_PROOF.size))
        self.needed = 0
        proof = _proof(self._token, b"server", self._nonces + self._method_list)
        return _WELCOME.pack(HandshakeStatus.OK, len(self._method_list), proof) + self._method_list

    def _refuse(self, error: MoonserveError) -> None:
        self.refusal = error
        self.needed = 0


def _proof(token: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(token, b"moonserve lean " + role + transcript, "sha256")


def _other_version(version: int) -> Incompatible:
    return Incompatible(f"the peer uses version {version} of the RPC protocol, this process version {PROTOCOL_VERSION}")
