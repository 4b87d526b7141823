"""Reading mapped memory: whole, committed and present, or said not to be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.client.near import Near
from kvstore.client.objects import Fate
from kvstore.client.spots import Spots
from tests.kvstore.client.published import Published, key
from transfer import TransferEngine


@pytest.fixture
def published() -> Iterator[Published]:
    with TransferEngine(cluster_token="near") as engine:
        yield Published(engine, engine.allocate(1 << 20, readable=True))


def reader(published: Published) -> Near:
    return Near(published.index.memory, published.data.buffer)


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
    assert near.exist([key(1)]) == [True]
