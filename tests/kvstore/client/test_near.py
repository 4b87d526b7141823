"""Reading mapped memory: whole, committed and present, or said not to be."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvstore.client.fate import Fate
from kvstore.client.near import Near
from kvstore.client.spots import Spots
from kvstore.native.layout import Retired
from protocol.errors import InvalidRequest
from tests.kvstore.client.published import Published, key
from transfer import TransferEngine


@pytest.fixture
def published() -> Iterator[Published]:
    with TransferEngine(cluster_token="near") as engine:
        yield Published(engine, engine.allocate(1 << 20, readable=True))


def reader(published: Published) -> Near:
    return Near(published.index.memory, published.data.buffer)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("length", [0, 1, 2, 255, 100_000])
def test_a_value_of_any_size_is_read(published: Published, length: int, verify: bool) -> None:
    value = os.urandom(length)
    published.put(1, value)
    near = reader(published)
    assert near.values([key(1), key(2)], verify=verify) == [value, Fate.ABSENT]
    assert near.exist([key(1), key(2)]) == [True, False]
    local = published.engine.allocate(200_000)
    spots = Spots.packed(local, [100_000, 100_000])
    assert near.into(key(2) + key(1), spots, verify=verify) == [Fate.ABSENT, length]
    assert local.buffer[100_000 : 100_000 + length] == value


def test_bytes_that_do_not_match_are_corrupt_unless_nobody_asks(published: Published) -> None:
    entry = published.put(1, b"precious")
    assert entry.offset is not None
    published.data.buffer[entry.offset] ^= 1
    near = reader(published)
    local = published.engine.allocate(4096)
    spots = Spots.packed(local, [8])
    assert near.values([key(1)], verify=True) == [Fate.CORRUPT]
    assert near.into(key(1), spots, verify=True) == [Fate.CORRUPT]
    assert near.values([key(1)], verify=False) == [b"qrecious"]
    assert near.into(key(1), spots, verify=False) == [8]


def test_what_is_only_on_disk_is_left_to_the_node(published: Published) -> None:
    published.put(1, b"cold")
    published.index.relocate(key(1), None)
    near = reader(published)
    local = published.engine.allocate(4096)
    assert near.values([key(1)], verify=True) == [Fate.ASK]
    assert near.into(key(1), Spots.packed(local, [8]), verify=True) == [Fate.ASK]
    assert near.part(key(1), 0, 1) is Fate.ASK
    assert near.exist([key(1)]) == [True]


def test_a_value_that_does_not_fit_is_refused_with_both_sizes(published: Published) -> None:
    published.put(1, bytes(100))
    local = published.engine.allocate(4096)
    with pytest.raises(InvalidRequest, match="100 bytes, the room for it 99"):
        reader(published).into(key(1), Spots.packed(local, [99]), verify=True)


def test_a_part_is_read_from_within_the_value_only(published: Published) -> None:
    value = os.urandom(1000)
    published.put(1, value)
    near = reader(published)
    assert near.part(key(1), 10, 20) == value[10:30]
    assert near.part(key(1), 1000, 0) == b""
    assert near.part(key(2), 0, 1) is Fate.ABSENT
    for offset, length in [(0, 1001), (-1, 2), (999, 2), (0, -1)]:
        with pytest.raises(InvalidRequest, match="1000 bytes"):
            near.part(key(1), offset, length)


def test_an_index_that_has_moved_says_so(published: Published) -> None:
    published.put(1, b"value")
    near = reader(published)
    local = published.engine.allocate(4096)
    published.grow()
    for call in (
        lambda: near.values([key(1)], verify=True),
        lambda: near.into(key(1), Spots.packed(local, [8]), verify=True),
        lambda: near.exist([key(1)]),
        lambda: near.part(key(1), 0, 1),
    ):
        with pytest.raises(Retired):
            call()
    assert reader(published).values([key(1)], verify=True) == [b"value"]
