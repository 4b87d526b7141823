"""Reads of mapped memory and of remote memory at known places: a value is whole and committed, or reported missing."""

import os
from collections.abc import Iterator, Sequence

import pytest

from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.kvstore.client.node_access.deadline import Deadline
from moonserve.kvstore.client.node_access.mapped_and_remote import MappedObjects, RemoteObjects
from moonserve.kvstore.client.node_access.objects import ReadMiss
from moonserve.kvstore.index_layout import Entry
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.transfer import RemoteSegment, TransferEngine, TransferOptions
from tests.kvstore.client.published import Published
from tests.kvstore.node.nodes import key

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


def test_a_mapped_object_is_corrupt_if_verification_fails(published: Published) -> None:
    near, keys = MappedObjects(published.index.memory, published.data.buffer), [key(1), key(2), key(3)]
    slots = BufferSlots.packed(published.engine.allocate(1 << 16), [8192] * 3)
    rotten = VALUE[:17] + bytes([VALUE[17] ^ 1]) + VALUE[18:]
    assert near.values(keys, verify=True) == [VALUE, ReadMiss.ASK_NODE, ReadMiss.CORRUPT]
    assert near.values(keys, verify=False) == [VALUE, ReadMiss.ASK_NODE, rotten]
    assert near.into(b"".join(keys), slots, verify=True) == [5000, ReadMiss.ASK_NODE, ReadMiss.CORRUPT]
    assert near.into(b"".join(keys), slots, verify=False) == [5000, ReadMiss.ASK_NODE, 5000]
    assert near.exist(keys) == [True] * 3


def test_objects_located_by_the_node_are_read_together_and_mismatches_are_leased(
    published: Published, engine: TransferEngine
) -> None:
    """A remote value with a wrong checksum is left to the node: only a lease tells replaced from damaged values."""

    def find(keys: Sequence[BlockKey], deadline: Deadline) -> list[Entry | None]:
        return [published.index.find(each) for each in keys]

    far = RemoteObjects(engine, find, RemoteSegment(published.engine.address, published.data.segment_id))
    keys, local = [key(number) for number in (1, 2, 3, 4)], engine.allocate(1 << 16)
    slots = BufferSlots.packed(local, [8192] * 4)
    fates = far.read(keys, slots, Deadline(10.0))
    assert fates == [len(VALUE), ReadMiss.ASK_NODE, ReadMiss.ASK_NODE, ReadMiss.ABSENT]
    assert bytes(slots.memory(0, len(VALUE))) == VALUE
    with pytest.raises(InvalidRequest, match="5000 bytes, the room for it 10"):
        far.read(keys[:1], BufferSlots.packed(local, [10]), Deadline(10.0))
