"""Two engines joined by a fake network, whose every slice, connection and fence ends as a test orders."""

from __future__ import annotations

from collections.abc import Callable

from tests.transfer.fake_transport import FakeNetwork, Fate
from transfer import Op, RemoteSegment, Segment, Transfer, TransferEngine, TransferOptions
from transfer.base import Slice
from transfer.lane import Lane

NBYTES = 1 << 16
TOKEN = "token of the two engines"


class Bench:
    """Two engines joined by a fake network of `num_rails` rails."""

    def __init__(self, network: FakeNetwork, **options: int) -> None:
        chosen = TransferOptions(transports=("fake",), **options)  # type: ignore[arg-type]
        self.network = network
        self.near = TransferEngine(cluster_token=TOKEN, options=chosen)
        self.far = TransferEngine(cluster_token=TOKEN, options=chosen)
        self.near.start()
        self.far.start()
        self.local = self.near.allocate(NBYTES)
        self.local.buffer[:] = bytes(range(256)) * (NBYTES // 256)
        self.memory = self.far.allocate(NBYTES, readable=True)
        self.window_id = self.far.open_window(self.memory, [(0, NBYTES)])

    def close(self) -> None:
        self.near.close()
        self.far.close()

    @property
    def remote(self) -> RemoteSegment:
        return RemoteSegment(self.far.address, self.memory.segment_id)

    def write(self, start: int = 0, length: int = 4096, local: Segment | None = None) -> Transfer:
        source = local or self.local
        return Transfer(Op.WRITE, source, start, self.remote, start, length, self.window_id)

    def read(self, start: int = 0, length: int = 4096) -> Transfer:
        return Transfer(Op.READ, self.local, start, self.remote, start, length)

    @property
    def lane(self) -> Lane:
        (peer,) = self.near._peers.met.values()
        (lane,) = peer._lanes.values()
        return lane


class Orders:
    """Fates by occasion, used up one by one; ARRIVES when there are none left."""

    def __init__(self) -> None:
        self.slices: list[Fate] = []
        self.connects: list[Fate] = []
        self.fences: list[Fate] = []
        self.lists: list[Fate] = []
        self.on_slice: Callable[[], None] = lambda: None
        self.on_fence: Callable[[], None] = lambda: None
        self.on_connect: Callable[[], None] = lambda: None

    def __call__(self, occasion: str, part: Slice | None) -> Fate:
        getattr(self, f"on_{occasion}", lambda: None)()
        fates: list[Fate] = getattr(self, f"{occasion}s" if occasion != "slice" else "slices")
        return fates.pop(0) if fates else Fate.ARRIVES


Make = Callable[..., Bench]
