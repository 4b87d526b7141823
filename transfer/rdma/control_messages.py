"""Messages that the two ends exchange on the TCP connection next to the queue pairs.

CONNECT   one `PairAddress` per queue pair      → REPLY with the same number of them
KEY       rows (none without checksums)         → REPLY: key and address to read at, checksum of the rows
GRANT     rows, window, checksum, queue pair    → REPLY: grant number, key and address to write at
                                                  … and, after the write, RESULT with the grant's number
"""

import struct
from typing import NamedTuple

from xxhash import xxh3_64_digest

from moonserve.protocol.errors import MoonserveError
from moonserve.transfer.rdma.device import Limits, PairAddress, QueuePair
from moonserve.transfer.tcp.frames import MAX_TEXT_BYTES, Code, Header, Kind, ProtocolViolation, code_of, encode

_PAIR = struct.Struct("<II16sHBB")
PAIR_BYTES = _PAIR.size
_KEY = struct.Struct("<IQQ")
KEY_BYTES = _KEY.size + 8
"""Includes a seal: the XXH3-64 of the whole reply."""
MAX_PAIRS = 16
MAX_GRANTS = 64
"""Writes in flight per connection: the number of receives that each of the target's queue pairs has room for."""


class RemoteKey(NamedTuple):
    """Access to a peer's segment: its key, base address and size."""

    key: int
    address: int
    nbytes: int


def pack_pair(pair: QueuePair, gid: bytes, lid: int, limits: Limits) -> bytes:
    return _PAIR.pack(pair.number, pair.first_packet, gid, lid, limits.path_mtu, limits.max_outstanding_reads)


def unpack_pairs(data: bytes | bytearray, limits: Limits) -> list[PairAddress]:
    """Unpacks the peer's addresses, limited to what both ends support. Raises ProtocolViolation for impossible
    values."""
    pairs = [PairAddress(*fields) for fields in _PAIR.iter_unpack(data)]
    return [_agreed(pair, limits) for pair in pairs]


def _agreed(pair: PairAddress, limits: Limits) -> PairAddress:
    if not 1 <= pair.path_mtu <= 5 or pair.number >> 24 or pair.first_packet >> 24:
        raise ProtocolViolation("invalid address of a queue pair")
    return PairAddress(
        pair.number,
        pair.first_packet,
        pair.gid,
        pair.lid,
        min(pair.path_mtu, limits.path_mtu),
        min(pair.max_outstanding_reads, limits.max_outstanding_reads),
    )


def key_reply(key: RemoteKey, *, grant: int = 0, checksum: int = 0) -> bytes:
    header = encode(Header(kind=Kind.REPLY, entries=KEY_BYTES, source_id=grant, checksum=checksum))
    body = _KEY.pack(*key)
    return header + body + xxh3_64_digest(header + body)


def unpack_key(header: Header, data: bytes | bytearray) -> RemoteKey:
    """Unpacks a key. Raises ProtocolViolation if its seal is wrong, since the key decides where bytes go."""
    if len(data) != KEY_BYTES:
        raise ProtocolViolation("a reply with a key has a wrong size")
    body, seal = data[: _KEY.size], data[_KEY.size :]
    if xxh3_64_digest(encode(header) + body) != seal:
        raise ProtocolViolation("a reply with a key has a wrong checksum")
    return RemoteKey(*_KEY.unpack(body))


def result(grant: int, error: MoonserveError | None) -> bytes:
    """Encodes the RESULT of a grant."""
    text = str(error).encode()[:MAX_TEXT_BYTES] if error else b""
    code = code_of(error) if error else Code.OK
    return encode(Header(kind=Kind.RESULT, code=code, entries=len(text), source_id=grant)) + text
