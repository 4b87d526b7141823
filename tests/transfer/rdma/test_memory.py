"""A key is told only as long as whoever is told it ends before the key does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from protocol.errors import InvalidRequest
from tests.transfer.fake_fabric import FakeDevice, FakeFabric, Wire
from transfer.rdma.rail import RegisteredMemory
from transfer.segments import Segment, SegmentTable


class Connection:
    """Ends at once; `on_end` is what happens meanwhile."""

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        self._on_end = on_end

    def end(self) -> None:
        self._on_end()


@pytest.fixture
def memory(wire: Wire) -> RegisteredMemory:
    fabric = FakeFabric(wire)
    (port,) = fabric.ports()
    return RegisteredMemory(FakeDevice(wire, port))


@pytest.fixture
def segment() -> Segment:
    return SegmentTable().allocate(4096, readable=True)


@pytest.mark.parametrize("access", ["readable", "writable"])
def test_a_connection_that_found_a_segment_before_its_removal_is_told_no_key_of_it(
    memory: RegisteredMemory, segment: Segment, access: str
) -> None:
    """The keys are there still while the removal waits for the connections that were told them."""
    ask = getattr(memory, access)
    refused: list[InvalidRequest] = []

    def ask_late() -> None:
        with pytest.raises(InvalidRequest) as caught:
            ask(segment, Connection())
        refused.append(caught.value)

    ask(segment, Connection(ask_late))
    memory.remove(segment)
    ask_late()
    assert len(refused) == 2
    assert not memory._told
