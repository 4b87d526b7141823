"""The device through pyverbs, without the engine: what `transfer.rdma.fabric` promises."""

from __future__ import annotations

import select
from collections.abc import Iterator

import pytest

from transfer.native import address_of
from transfer.rdma.device import choose
from transfer.rdma.fabric import Completion, CompletionQueue, Device, PairAddress, QueuePair
from transfer.rdma.verbs import VerbsFabric

NBYTES = 1 << 18


class End:
    """A queue pair with its completion queue."""

    def __init__(self, device: Device, *, serves: bool) -> None:
        self.device = device
        self.completions: CompletionQueue = device.make_completion_queue(512)
        self.pair: QueuePair = device.make_queue_pair(self.completions, send_depth=128, receive_depth=8, serves=serves)

    @property
    def address(self) -> PairAddress:
        assert self.device.port.gid is not None
        limits = self.device.limits
        return PairAddress(
            self.pair.number,
            self.pair.first_packet,
            self.device.port.gid.raw,
            0,
            limits.path_mtu,
            limits.max_outstanding_reads,
        )

    def next(self, timeout_s: float = 20.0) -> Completion:
        """Sleeps until there is one."""
        assert self.completions.descriptor is not None
        poller = select.poll()
        poller.register(self.completions.descriptor, select.POLLIN)
        while True:
            self.completions.arm()
            if found := self.completions.poll(1):
                return found[0]
            assert poller.poll(timeout_s * 1000), "no completion came"
            self.completions.acknowledge()

    def close(self) -> None:
        self.pair.close()
        self.completions.close()


@pytest.fixture
def device() -> Iterator[Device]:
    fabric = VerbsFabric()
    device = fabric.open(choose(fabric.ports(), ())[0])
    yield device
    device.close()


@pytest.fixture
def ends(device: Device) -> Iterator[tuple[End, End]]:
    near, far = End(device, serves=False), End(device, serves=True)
    far.pair.connect(near.address)
    near.pair.connect(far.address)
    yield near, far
    near.close()
    far.close()


def test_a_port_with_a_routable_gid_is_found_for_each_interface() -> None:
    ports = choose(VerbsFabric().ports(), ())
    assert [port.name for port in ports] == ["rxe0:1", "rxe1:1"]
    assert [port.gid and port.gid.ip for port in ports] == ["10.77.0.1", "10.77.1.1"]
    assert {port.gid and port.gid.kind for port in ports} == {"RoCE v2"}


def test_memory_without_permission_cannot_be_read(device: Device, ends: tuple[End, End]) -> None:
    near, _ = ends
    memory, target = bytearray(b"x" * 4096), bytearray(4096)
    secret = device.register(address_of(memory), 4096, remote_read=False, remote_write=True)
    into = device.register(address_of(target), 4096, remote_read=False, remote_write=False)
    near.pair.read(1, [(address_of(memory), address_of(target), 4096)], into.local_key, secret.remote_key)
    assert near.next().failure == "rem access"
    assert target == bytes(4096)
    secret.close()
    into.close()


def test_a_failed_pair_ends_its_peers_requests(device: Device, ends: tuple[End, End]) -> None:
    near, far = ends
    memory, target = bytearray(b"x" * 4096), bytearray(4096)
    source = device.register(address_of(memory), 4096, remote_read=True, remote_write=False)
    into = device.register(address_of(target), 4096, remote_read=False, remote_write=False)
    far.pair.fail()
    near.pair.read(1, [(address_of(memory), address_of(target), 4096)], into.local_key, source.remote_key)
    assert near.next().failure == "retry exc"
    near.pair.read(2, [(address_of(memory), address_of(target), 4096)], into.local_key, source.remote_key)
    assert near.next().failure == "wr flush"
    assert target == bytes(4096)
    source.close()
    into.close()
