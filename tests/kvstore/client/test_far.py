"""One-sided reads of a published index and its data, over real connections."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvstore.client.deadline import Deadline
from kvstore.client.far import Far
from kvstore.client.fate import Fate
from kvstore.client.index_run import Found
from kvstore.client.scratch import Scratch
from kvstore.client.spots import Spots
from kvstore.native.layout import Retired
from protocol.errors import InvalidRequest
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
    address, index = published.engine.address, published.index_segments[-1]
    return Far(
        engine,
        Scratch(engine),
        RemoteSegment(address, index.segment_id),
        index.nbytes,
        RemoteSegment(address, published.data.segment_id),
        Deadline(10.0),
    )


def found(reader: Far, number: int) -> Found:
    [look] = reader.look([key(number)], Deadline(10.0))
    assert isinstance(look, Found)
    return look


def into(
    reader: Far, seen: Found, engine: TransferEngine, *, verify: bool, room: int = 8192
) -> int | Fate:
    spots = Spots.packed(engine.allocate(8192), [room])
    [fate] = reader.into([key(1)], [seen], spots, verify=verify, deadline=Deadline(10.0))
    if isinstance(fate, int):
        assert bytes(spots.memory(0, fate)) == VALUE
    return fate


@pytest.mark.parametrize("verify", [True, False])
def test_index_and_bytes_are_read(
    published: Published, reading: TransferEngine, verify: bool
) -> None:
    published.put(1, VALUE)
    reader = far(published, reading)
    assert reader.look([key(2), key(1)], Deadline(10.0))[0] is Fate.ABSENT
    assert into(reader, found(reader, 1), reading, verify=verify) == len(VALUE)
    assert reader.part(key(1), 7, 100, Deadline(10.0)) == VALUE[7:107]


@pytest.mark.parametrize("verify", [True, False])
def test_an_object_that_was_replaced_meanwhile_is_not_taken_for_rotten(
    published: Published, reading: TransferEngine, verify: bool
) -> None:
    entry = published.put(1, VALUE)
    reader = far(published, reading)
    seen = found(reader, 1)
    assert entry.offset is not None
    published.index.remove(key(1))
    published.data.buffer[entry.offset] ^= 1
    published.put(1, os.urandom(10))
    assert into(reader, seen, reading, verify=verify) is Fate.ASK


def test_an_object_that_went_away_and_came_back_to_its_place_is_noticed(
    published: Published, reading: TransferEngine
) -> None:
    entry = published.put(1, VALUE)
    reader = far(published, reading)
    seen = found(reader, 1)
    published.index.relocate(key(1), None)
    published.index.relocate(key(1), entry.offset)
    assert into(reader, seen, reading, verify=False) is Fate.ASK


def test_bytes_that_do_not_match_an_unchanged_entry_are_corrupt(
    published: Published, reading: TransferEngine
) -> None:
    entry = published.put(1, VALUE)
    assert entry.offset is not None
    published.data.buffer[entry.offset + 17] ^= 1
    reader = far(published, reading)
    assert into(reader, found(reader, 1), reading, verify=True) is Fate.CORRUPT


def test_an_index_that_has_moved_says_nothing_any_more(
    published: Published, reading: TransferEngine
) -> None:
    published.put(1, VALUE)
    reader = far(published, reading)
    seen = found(reader, 1)
    published.grow()
    with pytest.raises(Retired):
        reader.look([key(1)], Deadline(10.0))
    with pytest.raises(Retired):
        into(reader, seen, reading, verify=False)
    published.engine.deregister(published.index_segments[0])
    with pytest.raises(Retired):
        reader.look([key(1)], Deadline(10.0))
    assert into(far(published, reading), seen, reading, verify=False) == len(VALUE)


def test_a_value_that_does_not_fit_is_refused_before_it_is_read(
    published: Published, reading: TransferEngine
) -> None:
    published.put(1, VALUE)
    reader = far(published, reading)
    with pytest.raises(InvalidRequest, match="5000 bytes, the room for it 10"):
        into(reader, found(reader, 1), reading, verify=True, room=10)
