"""The directory agrees with a naive model of sets, whatever the order of events, restarts and losses."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.directory import Directory
from protocol.ids import InstanceId
from protocol.keys import NO_PARENT, BlockKey
from protocol.membership import BlockLog
from protocol.pb import conductor_pb2
from tests.thoroughness import examples


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


A, B, C = (InstanceId(name) for name in ("a", "b", "c"))
KEYS = [key(n) for n in range(6)]


def added(*numbers: int) -> list[tuple[BlockKey, BlockKey]]:
    return [(key(n), NO_PARENT) for n in numbers]


def test_prefix_lengths_counts_leading_blocks_only() -> None:
    directory = Directory()
    assert directory.apply(A, 1, added(0, 1, 3), [], 1, 4, False)
    assert directory.apply(B, 1, added(0), [], 1, 2, False)
    assert directory.apply(C, 1, added(1, 2), [], 1, 3, False)
    assert directory.prefix_lengths(KEYS[:4]) == {A: 2, B: 1}
    assert directory.prefix_lengths([]) == {}
    assert directory.prefix_lengths([key(99)]) == {}
    assert set(directory.holders(key(1))) == {A, C}
    directory.validate()


def test_a_block_that_is_announced_twice_in_one_message_counts_once() -> None:
    directory = Directory()
    pair = (key(1), key(0))
    assert directory.apply(A, 1, [(key(0), NO_PARENT), pair, pair], [], 1, 4, False)
    assert directory.num_blocks(A) == 2
    directory.validate()


def test_a_gap_is_reported_and_changes_nothing() -> None:
    directory = Directory()
    assert directory.apply(A, 1, added(0), [], 1, 2, False)
    assert not directory.apply(A, 1, added(1), [], 3, 4, False)
    assert directory.holders(key(1)) == []
    assert directory.apply(A, 1, added(0, 1), [], 3, 4, True)
    assert directory.apply(A, 1, [], [key(0)], 4, 5, False)
    assert directory.holders(key(0)) == []
    assert directory.holders(key(1)) == [A]
    directory.validate()


def test_a_stranger_who_starts_in_the_middle_must_send_a_snapshot() -> None:
    directory = Directory()
    assert not directory.apply(A, 1, added(0), [], 5, 6, False)
    assert directory.apply(A, 1, added(0), [], 5, 6, True)
    directory.validate()


def test_a_repeated_message_is_harmless() -> None:
    directory = Directory()
    for _ in range(2):
        assert directory.apply(A, 1, added(0), [], 1, 2, False)
    assert directory.apply(A, 1, [], [key(0)], 2, 3, False)
    assert directory.apply(A, 1, added(0), [], 1, 2, False)  # late copy of the first
    assert directory.holders(key(0)) == []
    directory.validate()


def test_a_new_epoch_starts_empty_and_the_old_one_is_ignored() -> None:
    directory = Directory()
    assert directory.apply(A, 1, added(0, 1), [], 1, 3, False)
    assert directory.apply(A, 2, [], [], 1, 1, True)
    assert directory.prefix_lengths(KEYS) == {}
    assert directory.apply(A, 1, added(2), [], 3, 4, False)
    assert directory.prefix_lengths([key(2)]) == {}
    assert directory.num_blocks(A) == 0
    directory.validate()


def test_dropped_instances_leave_no_memory_behind() -> None:
    directory = Directory()
    for epoch in range(1, 20):
        assert directory.apply(A, epoch, added(*range(1000)), [], 1, 1001, False)
    assert directory.apply(B, 1, added(*range(10)), [], 1, 11, False)
    directory.drop(A)
    directory.drop(A)
    assert directory.prefix_lengths(KEYS) == {B: 6}
    directory.validate()
    for epoch in range(20, 200):
        assert directory.apply(A, epoch, added(0), [], 1, 2, False)
    assert len(directory) <= 2048
    directory.validate()


@dataclass
class Instance:
    """A real block log, and what the directory must know of it."""

    epoch: int = 1
    log: BlockLog = field(default_factory=BlockLog)
    present: set[BlockKey] = field(default_factory=set)
    announced: set[BlockKey] = field(default_factory=set)


class DirectoryFollowsInstances(RuleBasedStateMachine):
    """Instances add, remove, restart and lose messages; the directory follows what was delivered."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory()
        self.instances = {name: Instance() for name in (A, B, C)}

    names = st.sampled_from([A, B, C])
    keys = st.sampled_from(KEYS)

    @rule(name=names, block=keys)
    def adds(self, name: InstanceId, block: BlockKey) -> None:
        self.instances[name].log.added(block, None)
        self.instances[name].present.add(block)

    @rule(name=names, block=keys)
    def removes(self, name: InstanceId, block: BlockKey) -> None:
        self.instances[name].log.removed(block)
        self.instances[name].present.discard(block)

    @rule(name=names, reply_lost=st.booleans())
    def delivers(self, name: InstanceId, reply_lost: bool) -> None:
        """Heartbeats, also an empty one, until the instance has nothing more to say."""
        instance = self.instances[name]
        while True:
            self._deliver(name, instance.log.changes(), reply_lost)
            if reply_lost or not instance.log.has_changes:
                return

    def _deliver(
        self, name: InstanceId, events: conductor_pb2.BlockEvents, reply_lost: bool
    ) -> None:
        instance = self.instances[name]
        if not self._apply(name, events):
            events = instance.log.snapshot()
            assert self._apply(name, events)
            instance.announced = set(instance.present)
        else:
            instance.announced |= set(unpack(events.added_keys))
            instance.announced -= set(unpack(events.removed_keys))
        if not reply_lost:
            instance.log.acknowledge(events)

    @rule(name=names)
    def loses_a_message(self, name: InstanceId) -> None:
        log = self.instances[name].log
        log.acknowledge(log.changes())

    @rule(name=names)
    def restarts_empty(self, name: InstanceId) -> None:
        epoch = self.instances[name].epoch + 1
        self.instances[name] = Instance(epoch=epoch)
        assert self._apply(name, self.instances[name].log.snapshot())

    @rule(name=names)
    def is_dropped(self, name: InstanceId) -> None:
        self.directory.drop(name)
        self.instances[name].announced.clear()

    @rule()
    def sweeps(self) -> None:
        self.directory._sweep()

    def _apply(self, name: InstanceId, events: conductor_pb2.BlockEvents) -> bool:
        return self.directory.apply(
            name,
            self.instances[name].epoch,
            list(zip(unpack(events.added_keys), unpack(events.added_parents), strict=True)),
            unpack(events.removed_keys),
            events.first_seq,
            events.next_seq,
            events.snapshot,
        )

    @invariant()
    def agrees_with_the_naive_model(self) -> None:
        self.directory.validate()
        expected: dict[InstanceId, int] = {}
        for name, instance in self.instances.items():
            length = 0
            while length < len(KEYS) and KEYS[length] in instance.announced:
                length += 1
            if length:
                expected[name] = length
            assert self.directory.num_blocks(name) == len(instance.announced)
        assert self.directory.prefix_lengths(KEYS) == expected
        for block in KEYS:
            holders = {n for n, i in self.instances.items() if block in i.announced}
            assert set(self.directory.holders(block)) == holders


def unpack(packed: bytes) -> list[BlockKey]:
    return [BlockKey(packed[i : i + 16]) for i in range(0, len(packed), 16)]


TestDirectoryFollowsInstances = DirectoryFollowsInstances.TestCase
TestDirectoryFollowsInstances.settings = settings(
    max_examples=examples(30), stateful_step_count=30, deadline=None
)


@given(st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=80), st.integers(0, 6))
@settings(max_examples=examples(30), deadline=None)
def test_prefix_match_of_many_instances_equals_the_naive_one(
    holdings: list[set[int]], length: int
) -> None:
    directory = Directory()
    for index, held in enumerate(holdings):
        name = InstanceId(f"i{index}")
        assert directory.apply(name, 1, added(*held), [], 1, 1 + len(held), False)
    expected = {}
    for index, held in enumerate(holdings):
        run = next((n for n in range(length) if n not in held), length)
        if run:
            expected[InstanceId(f"i{index}")] = run
    assert directory.prefix_lengths(KEYS[:length]) == expected
    directory.validate()
    leading = directory.leading(b"".join(KEYS[:length]))
    bits = np.array([directory.bit(InstanceId(f"i{n}")) for n in range(len(holdings))])
    runs = {InstanceId(f"i{n}"): run for n, run in enumerate(leading.runs[bits].tolist()) if run}
    assert runs == expected
    for block in range(len(leading.slots)):
        has = [block in held for held in holdings]
        assert leading.holders(bits, block).tolist() == has
        assert leading.hold(bits, np.full(len(bits), block)).tolist() == has
        assert [leading.has(bit, block) for bit in bits.tolist()] == has
    for bit, held in zip(bits.tolist(), holdings, strict=True):
        for first in range(len(leading.slots)):
            gaps = (n for n in range(first, len(leading.slots)) if n not in held)
            assert leading.end_of_run(bit, first) == next(gaps, len(leading.slots))
