"""Reads of mapped memory and of remote memory at known places: a value is whole and committed, or reported missing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from kvstore.client.deadline import Deadline
from kvstore.client.far import Far
from kvstore.client.near import Near
from kvstore.client.objects import Fate
from kvstore.client.spots import Spots
from kvstore.native.base import Entry
from protocol.errors import InvalidRequest
from protocol.keys import BlockKey
from tests.kvstore.client.published import Published
from tests.kvstore.nodes import key
from transfer import RemoteSegment, TransferEngine, TransferOptions

TCP = TransferOptions(transports=("tcp",), checksums=False)
VALUE = os.urandom(5000)


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(cluster_token="far", options=TCP) as engine:
        yield engine


@pytest.fixture
def published() -> Iterator[Published]:
    """Publishes values 1, 2 and 3, of which 2 is only on disk and 3 is damaged."""
    with TransferEngine(cluster_token="far", options=TCP) as owner:
        published = Published(owner, owner.allocate(1 << 20, readable=True))
        entries = [published.put(number, VALUE) for number in (1, 2, 3)]
        published.index.relocate(key(2), None)
        assert entries[2].offset is not None
        published.data.buffer[entries[2].offset + 17] ^= 1
        yield published


def test_what_is_mapped_is_corrupt_when_it_does_not_match_unless_nobody_asks(published: Published) -> None:
    near, keys = Near(published.index.memory, published.data.buffer), [key(1), key(2), key(3)]
    spots = Spots.packed(published.engine.allocate(1 << 16), [8192] * 3)
    rotten = VALUE[:17] + bytes([VALUE[17] ^ 1]) + VALUE[18:]
    assert near.values(keys, verify=True) == [VALUE, Fate.ASK, Fate.CORRUPT]
    assert near.values(keys, verify=False) == [VALUE, Fate.ASK, rotten]
    assert near.into(b"".join(keys), spots, verify=True) == [5000, Fate.ASK, Fate.CORRUPT]
    assert near.into(b"".join(keys), spots, verify=False) == [5000, Fate.ASK, 5000]
    assert near.exist(keys) == [True] * 3


def test_what_somebody_tells_is_read_together_and_what_does_not_match_is_left_to_the_node(
    published: Published, engine: TransferEngine
) -> None:
    """A remote value with a wrong checksum is left to the node: only a lease tells replaced from damaged values."""

    def find(keys: Sequence[BlockKey], deadline: Deadline) -> list[Entry | None]:
        return [published.index.find(each) for each in keys]

    far = Far(engine, find, RemoteSegment(published.engine.address, published.data.segment_id))
    keys, local = [key(number) for number in (1, 2, 3, 4)], engine.allocate(1 << 16)
    spots = Spots.packed(local, [8192] * 4)
    fates = far.fetch(keys, spots, Deadline(10.0))
    assert fates == [len(VALUE), Fate.ASK, Fate.ASK, Fate.ABSENT]
    assert bytes(spots.memory(0, len(VALUE))) == VALUE
    with pytest.raises(InvalidRequest, match="5000 bytes, the room for it 10"):
        far.fetch(keys[:1], Spots.packed(local, [10]), Deadline(10.0))
