"""Models the true contents of a node with two tiers, and states the invariants between this model and the node's state.

It does not define the events: these are the rules of `test_tier_machine`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

from hypothesis.stateful import RuleBasedStateMachine, invariant

from moonserve.kvstore.published_index import KeyIndex, MappedReader
from moonserve.kvstore.state.allocator import ALIGNMENT
from moonserve.kvstore.state.objects import DiskReadMove, DiskWriteMove, Lease, StoredObject, Tier, Watermarks
from moonserve.protocol.kv_blocks import BlockKey
from tests.kvstore.hardware import Disk, Memory
from tests.kvstore.state.states import Law, make_state

NUM_CHAINS, DEPTH = 3, 4
MEMORY_UNITS, DISK_UNITS, QUOTA_UNITS = 8, 14, 4


def key(number: int, depth: int) -> BlockKey:
    return BlockKey(bytes([number + 1, depth]).ljust(16, b"\0"))


def blocks(number: int) -> list[BlockKey]:
    return [key(number, depth) for depth in range(DEPTH)]


class TwoTiersInTruth(RuleBasedStateMachine):
    """A node, its disk, and a model of the objects that must be visible, leased and in flight after its history."""

    policy_name: str

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.count = 0
        self.next_generation = 1
        self.disk = Disk(DISK_UNITS * ALIGNMENT)
        self.removed_up_to: dict[BlockKey, int] = {}  # generations
        self.start()

    def start(self) -> None:
        """Starts a node of which nothing but the disk's contents survives from an earlier life."""
        self.memory = Memory(MEMORY_UNITS)
        self.law = Law()
        self.index = KeyIndex()
        self.state = make_state(
            self.memory.nbytes,
            self.law,
            policy=self.policy_name,
            watermarks=Watermarks(evict_above=0.25, evict_share=0.25),
            index=self.index,
            quotas={"limited": QUOTA_UNITS * ALIGNMENT},
            disk=self.disk,
            first_generation=self.next_generation,
        )
        rows = self.state.catalog.rows
        self.law.is_leaving = lambda block: rows.is_leaving(self.index.record_of(block))
        self.disk_is_lost = False
        self.unknown = self.disk.recover()  # not yet found by recovery
        self.truth: dict[BlockKey, tuple[int, int]] = {}  # visible objects: generation, content
        self.writing: dict[str, dict[BlockKey, int]] = {}  # contents by reservation
        self.expiring: dict[str, float] = {}  # expiry time by reservation
        self.closing: dict[str, dict[BlockKey, int]] = {}  # given up, windows still open
        self.stores: list[DiskWriteMove] = []
        self.loads: list[DiskReadMove] = []
        self.checks: list[StoredObject] = []
        self.waiting: dict[str, Lease] = {}  # leases that wait for reads
        self.leases: dict[str, tuple[float, tuple[StoredObject, ...]]] = {}

    def new_number(self) -> int:
        self.count += 1
        return self.count

    def protect(self) -> None:
        """Tells the law which visible objects leases protect from eviction."""
        self.law.leased = {
            stored.key
            for _, objects in self.leases.values()
            for stored in objects
            if self.truth.get(stored.key, (0, 0))[0] == stored.generation
        }

    @contextmanager
    def no_eviction(self) -> Iterator[None]:
        """Suspends the eviction rules while a client removes objects or the disk loses them."""
        self.law.no_eviction = True
        yield
        self.law.no_eviction = False

    # Invariants

    @invariant()
    def everything_is_accounted_for(self) -> None:
        leaving = {store.object.generation for store in self.stores if store.demote}
        visible = {generation: block for block, (generation, _) in self.truth.items()}
        assert all(self.law.is_leaving(visible[g]) for g in leaving & visible.keys())
        self.protect()
        self.state.validate()
        usage = self.state.catalog.usage()
        assert usage.num_objects == len(self.law.tiers)
        arriving = sum(store.disk_bytes for store in self.stores)
        assert usage.disk_live_bytes == 0 or usage.disk_live_bytes + arriving <= usage.disk_limit_bytes

    @invariant()
    def readers_of_the_index_see_what_was_committed_or_nothing(self) -> None:
        reader = MappedReader(self.index.memory, memoryview(b""))
        self.truth = {k: known for k, known in self.truth.items() if k in self.law.tiers}
        for block in chain.from_iterable(map(blocks, range(NUM_CHAINS))):
            entry = reader.find(block)
            assert (entry and (entry.generation, entry.checksum)) == self.truth.get(block)
            if entry is not None:
                assert (entry.offset is None) == (self.law.tiers[block] is Tier.DISK)
                assert entry.offset is None or self.memory.read(entry.offset, entry.length) == entry.checksum

    @invariant()
    def leases_show_the_bytes_that_were_committed(self) -> None:
        for _, objects in self.leases.values():
            for stored in objects:
                assert stored.offset is not None
                assert self.memory.read(stored.offset, stored.length) == stored.checksum

    @invariant()
    def places_on_disk_are_those_of_visible_objects(self) -> None:
        visible = {o.place: o for o in self.state.catalog.objects() if o.place is not None}
        unknown = {place for _, place in self.unknown}
        assert self.disk.live == visible.keys() | unknown
        for place, stored in visible.items():
            assert self.disk.kept[place].generation == stored.generation
