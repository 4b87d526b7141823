"""RDMA devices through pyverbs, without the engine: the contract of `transfer.rdma.device`."""

import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from moonserve.transfer.memory.data_plane import address_of
from moonserve.transfer.rdma.device import Completion, CompletionQueue, PairAddress, QueuePair, RdmaDevice, choose_ports
from moonserve.transfer.rdma.verbs import VerbsFabric


class End:
    """Queue pair with its completion queue."""

    def __init__(self, device: RdmaDevice, *, serves: bool) -> None:
        self.device = device
        self.completions: CompletionQueue = device.make_completion_queue(512)
        self.pair: QueuePair = device.make_queue_pair(self.completions, send_depth=128, receive_depth=8, serves=serves)

    @property
    def address(self) -> PairAddress:
        assert self.device.port.gid is not None
        gid, limits = self.device.port.gid.raw, self.device.limits
        pair, mtu, reads = self.pair, limits.path_mtu, limits.max_outstanding_reads
        return PairAddress(pair.number, pair.first_packet, gid, 0, mtu, reads)

    def next(self, timeout_s: float = 20.0) -> Completion:
        """Returns the next completion. Sleeps until there is one."""
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
def device() -> Iterator[RdmaDevice]:
    fabric = VerbsFabric()
    device = fabric.open(choose_ports(fabric.ports(), ())[0])
    yield device
    device.close()


@pytest.fixture
def ends(device: RdmaDevice) -> Iterator[tuple[End, End]]:
    near, far = End(device, serves=False), End(device, serves=True)
    far.pair.connect(near.address)
    near.pair.connect(far.address)
    yield near, far
    near.close()
    far.close()


def test_a_port_with_a_routable_gid_is_found_for_each_interface() -> None:
    ports = choose_ports(VerbsFabric().ports(), ())
    assert [port.name for port in ports] == ["rxe0:1", "rxe1:1"]
    assert [port.gid and port.gid.ip for port in ports] == ["10.77.0.1", "10.77.1.1"]
    assert {port.gid and port.gid.kind for port in ports} == {"RoCE v2"}


@contextmanager
def reading(device: RdmaDevice, near: End, *, remote_read: bool) -> Iterator[tuple[Callable[[int], None], bytearray]]:
    """Yields a function that posts a read with a token, and the buffer it fills. The source may not be readable."""
    memory, target = bytearray(b"x" * 4096), bytearray(4096)
    source = device.register(address_of(memory), 4096, remote_read=remote_read, remote_write=not remote_read)
    into = device.register(address_of(target), 4096, remote_read=False, remote_write=False)
    runs = [(address_of(memory), address_of(target), 4096)]
    yield lambda token: near.pair.read(token, runs, into.local_key, source.remote_key), target
    source.close()
    into.close()


def test_memory_without_permission_cannot_be_read(device: RdmaDevice, ends: tuple[End, End]) -> None:
    near, _ = ends
    with reading(device, near, remote_read=False) as (read, target):
        read(1)
        assert near.next().failure == "rem access"
        assert target == bytes(4096)


def test_a_failed_queue_pair_ends_the_peers_requests(device: RdmaDevice, ends: tuple[End, End]) -> None:
    near, far = ends
    with reading(device, near, remote_read=True) as (read, target):
        far.pair.fail()
        for token, failure in ((1, "retry exc"), (2, "wr flush")):
            read(token)
            assert near.next().failure == failure
        assert target == bytes(4096)
