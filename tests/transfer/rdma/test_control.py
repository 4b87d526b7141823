"""What the ends of a connection tell each other, and what is not believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import IntegrityError
from tests.transfer.fake_fabric import LIMITS
from transfer.rdma import control
from transfer.rdma.control import PAIR_BYTES, RemoteKey
from transfer.tcp.frames import HEADER_BYTES, Code, Kind, ProtocolViolation, decode


@given(key=st.builds(RemoteKey, *(st.integers(0, 2**bits - 1) for bits in (32, 64, 64))))
def test_a_key_arrives_as_it_was_sent(key: RemoteKey) -> None:
    frame = control.key_reply(key, grant=9, checksum=7)
    header = decode(frame[:HEADER_BYTES])
    assert (header.source_id, header.checksum) == (9, 7)
    assert control.unpack_key(header, frame[HEADER_BYTES:]) == key


@given(bit=st.integers(0, 8 * control.KEY_BYTES - 1))
def test_a_key_with_a_flipped_bit_is_not_believed(bit: int) -> None:
    frame = bytearray(control.key_reply(RemoteKey(1, 2, 3)))
    frame[HEADER_BYTES + bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolViolation):
        control.unpack_key(decode(frame[:HEADER_BYTES]), frame[HEADER_BYTES:])


@given(data=st.binary(min_size=PAIR_BYTES, max_size=PAIR_BYTES))
def test_what_is_no_queue_pair_is_refused(data: bytes) -> None:
    try:
        (pair,) = control.unpack_pairs(data, LIMITS)
    except ProtocolViolation:
        return
    assert pair.number < 1 << 24
    assert 1 <= pair.path_mtu <= LIMITS.path_mtu
    assert pair.max_outstanding_reads <= LIMITS.max_outstanding_reads


def test_a_grant_ends_well_or_with_words() -> None:
    assert decode(control.result(5, None)) == (Kind.RESULT, Code.OK, 0, 0, 0, 5, 0, 0)
    frame = control.result(5, IntegrityError("bad"))
    assert decode(frame[:HEADER_BYTES]).code is Code.CORRUPT
    assert frame[HEADER_BYTES:] == b"bad"
