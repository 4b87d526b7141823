"""Reads of objects whose places somebody else tells, over real connections."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from kvstore.client.deadline import Deadline
from kvstore.client.far import Far
from kvstore.client.objects import Fate
from kvstore.client.spots import Spots
from kvstore.native.base import Entry
from protocol.errors import InvalidRequest
from protocol.keys import BlockKey
from tests.kvstore.client.published import Published, key
from transfer import RemoteSegment, TransferEngine, TransferOptions

TCP = TransferOptions(transports=("tcp",), checksums=False)
VALUE = os.urandom(5000)


@pytest.fixture
def published() -> Iterator[Published]:
    with TransferEngine(cluster_token="far", options=TCP) as engine:
        yield Published(engine, engine.allocate(1 << 20, readable=True))


@pytest.fixture
def reading() -> Iterator[TransferEngine]:
    with TransferEngine(cluster_token="far", options=TCP) as engine:
        yield engine


def far(published: Published, engine: TransferEngine) -> Far:
    def find(keys: Sequence[BlockKey], deadline: Deadline) -> list[Entry | None]:
        return [published.index.find(each) for each in keys]

    data = RemoteSegment(published.engine.address, published.data.segment_id)
    return Far(engine, find, data)


def into(reader: Far, entry: Entry, engine: TransferEngine, *, room: int = 8192) -> int | Fate:
    spots = Spots.packed(engine.allocate(8192), [room])
    [fate] = reader.into([entry], spots, Deadline(10.0))
    if isinstance(fate, int):
        assert bytes(spots.memory(0, fate)) == VALUE
    return fate


def test_several_are_read_together_and_what_is_only_on_disk_is_left_to_the_node(
    published: Published, reading: TransferEngine
) -> None:
    entries = [published.put(number, VALUE) for number in (1, 2, 3)]
    published.index.relocate(key(2), None)
    reader = far(published, reading)
    looks = reader.look([key(1), key(2), key(3)], Deadline(10.0))
    entries = [look for look in looks if isinstance(look, Entry)]
    spots = Spots.packed(reading.allocate(1 << 16), [8192] * 3)
    fates = reader.into(entries, spots, Deadline(10.0))
    assert fates == [len(VALUE), Fate.ASK, len(VALUE)]
    assert bytes(spots.memory(2, len(VALUE))) == VALUE


def test_bytes_that_do_not_match_are_left_to_the_node(
    published: Published, reading: TransferEngine
) -> None:
    """They may have been replaced since, or have rotted: only under a lease it is known which."""
    entry = published.put(1, VALUE)
    assert entry.offset is not None
    published.data.buffer[entry.offset + 17] ^= 1
    assert into(far(published, reading), entry, reading) is Fate.ASK


def test_a_value_that_does_not_fit_is_refused_before_it_is_read(
    published: Published, reading: TransferEngine
) -> None:
    entry = published.put(1, VALUE)
    with pytest.raises(InvalidRequest, match="5000 bytes, the room for it 10"):
        into(far(published, reading), entry, reading, room=10)
