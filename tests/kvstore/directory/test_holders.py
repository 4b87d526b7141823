"""Compares the directory and its chains with a naive model, for any order of messages and restarts."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonserve.kvstore.directory import Changes, Directory
from moonserve.kvstore.directory.holders import MAX_CHAIN, BlockChains
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey, pack_keys
from moonserve.protocol.request import InstanceId
from tests.kvstore.node.nodes import key
from tests.thoroughness import any_order, examples

A = InstanceId("a")
PARENT_OF = {1: 0, 2: 1, 3: 2, 4: 2, 5: 0, 6: 5, 7: 3}  # two branches below 2, two below 0
KEYS = [key(number) for number in range(8)]


def added(*numbers: int) -> Changes:
    parents = [key(PARENT_OF[n]) if n in PARENT_OF else NO_PARENT for n in numbers]
    return Changes(added=pack_keys([key(n) for n in numbers]), parents=pack_keys(parents))


def removed(*numbers: int) -> Changes:
    return Changes(removed=pack_keys([key(n) for n in numbers]))


class Fed:
    """A directory that receives block changes one message at a time."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.chains = BlockChains(self.directory)

    def take(self, name: InstanceId, changes: Changes) -> None:
        seq = max(1, self.directory.next_seq(name))
        assert self.directory.apply_changes(name, 1, changes, seq, seq + 1, snapshot=False)
        self.directory.validate()


def test_a_key_that_is_named_twice_counts_once() -> None:
    fed = Fed()
    fed.take(A, added(3, 3))  # the key has a parent
    assert fed.directory.num_blocks(A) == 1
    fed.take(A, removed(3, 3))
    assert len(fed.directory) == 0
    assert fed.directory.apply_pairs(A, 2, [(key(1), key(0))] * 2, [], 1, 4, False)
    assert fed.directory.num_blocks(A) == 1
    fed.directory.validate()


@pytest.mark.parametrize(
    "changes", [Changes(added=bytes(15), parents=bytes(15)), Changes(added=bytes(16)), Changes(removed=bytes(17))]
)
def test_changes_that_contradict_themselves_are_refused_and_change_nothing(changes: Changes) -> None:
    directory = Directory()
    with pytest.raises(InvalidRequest):
        directory.apply_changes(A, 1, changes, 1, 2, snapshot=False)
    assert directory.next_seq(A) == 0


def test_a_block_that_is_announced_again_without_a_parent_keeps_the_parent() -> None:
    fed = Fed()
    fed.take(A, added(0, 1))
    fed.take(A, Changes(added=key(1), parents=NO_PARENT))
    assert fed.chains.chain_to(key(1)) == [key(0), key(1)]
    assert fed.chains.parent(key(1)) == key(0)
    assert fed.chains.parent(key(0)) is None


def test_a_walk_over_a_cycle_of_parents_ends() -> None:
    fed = Fed()
    fed.take(A, Changes(added=key(0) + key(1), parents=key(1) + key(0)))
    assert len(fed.chains.chain_to(key(0))) == MAX_CHAIN
    fed.take(A, removed(0, 1))
    assert len(fed.directory) == 0


@dataclass
class Instance:
    """The blocks that an instance holds, and the number of its next event."""

    epoch: int = 1
    next_seq: int = 1
    held: set[int] = field(default_factory=set)


class AnyOrder(RuleBasedStateMachine):
    """Up to 68 instances in two words of bits, ten of which change, lose messages, restart and are dropped."""

    names = st.integers(58, 67).map(lambda n: InstanceId(f"i{n}"))
    numbers = st.lists(st.integers(0, 7), unique=True)

    def __init__(self) -> None:
        super().__init__()
        self.fed = Fed()
        self.instances: dict[InstanceId, Instance] = {}
        self.known: dict[InstanceId, set[int]] = {}
        for n in range(62):
            self.holds(InstanceId(f"i{n}"), [n % 3], False)

    @rule(name=names, numbers=numbers, is_lost=st.booleans())
    def holds(self, name: InstanceId, numbers: list[int], is_lost: bool) -> None:
        self.instances.setdefault(name, Instance()).held.update(numbers)
        self._send(name, added(*numbers), is_lost)

    @rule(name=names, numbers=numbers, is_lost=st.booleans())
    def loses(self, name: InstanceId, numbers: list[int], is_lost: bool) -> None:
        self.instances.setdefault(name, Instance()).held.difference_update(numbers)
        self._send(name, removed(*numbers), is_lost)

    @rule(name=names)
    def restarts(self, name: InstanceId) -> None:
        before = self.instances.get(name, Instance())
        self.instances[name] = Instance(epoch=before.epoch + 1)
        self._send_inventory(name)
        assert self._take(name, before.epoch, added(7), 1, 2)  # late: ignored

    @rule(name=names)
    def is_dropped(self, name: InstanceId) -> None:
        self.fed.directory.drop(name)
        self.known.pop(name, None)

    def _send(self, name: InstanceId, changes: Changes, is_lost: bool) -> None:
        instance, directory = self.instances[name], self.fed.directory
        first, instance.next_seq = instance.next_seq, instance.next_seq + 1
        if is_lost:
            return
        is_same = directory.epoch(name) == instance.epoch
        expected = directory.next_seq(name) if is_same else 1
        taken = self._take(name, instance.epoch, changes, first, instance.next_seq)
        assert taken == (first <= expected)
        if not taken:
            self._send_inventory(name)
        elif first == expected:
            assert self._take(name, instance.epoch, changes, first, instance.next_seq)  # repeated
            if first > 1:
                assert self._take(name, instance.epoch, added(*range(8)), 1, first)  # late: ignored
        self.known[name] = set(instance.held)

    def _send_inventory(self, name: InstanceId) -> None:
        instance = self.instances[name]
        seq = instance.next_seq
        for index, piece in enumerate([added(n) for n in instance.held] or [Changes()]):
            assert self._take(name, instance.epoch, piece, seq, seq, snapshot=index == 0)
        self.known[name] = set(instance.held)

    def _take(
        self, name: InstanceId, epoch: int, changes: Changes, first: int, end: int, *, snapshot: bool = False
    ) -> bool:
        return self.fed.directory.apply_changes(name, epoch, changes, first, end, snapshot=snapshot)

    @invariant()
    def agrees_with_the_model(self) -> None:
        directory = self.fed.directory
        directory.validate()
        for number in range(8):
            expected = {name for name, held in self.known.items() if number in held}
            assert set(directory.holders(key(number))) == expected
            assert self.fed.chains.chain_to(key(number)) == self._chain(number)
        for name, held in self.known.items():
            assert directory.num_blocks(name) == len(held)
        assert len(directory.match(pack_keys(KEYS))) == sum(0 in h for h in self.known.values())

    @invariant()
    def what_follows_is_told_per_node(self) -> None:
        for name in list(self.known)[-2:]:
            held = self.known[name]
            expected = {key(p): {key(c) for c in held if PARENT_OF.get(c) == p} for p in range(8)}
            found = self.fed.chains.children_on(KEYS, name)
            assert {parent: set(children) for parent, children in found.items()} == {
                parent: children for parent, children in expected.items() if children
            }

    def _chain(self, number: int | None) -> list[BlockKey]:
        chain: list[BlockKey] = []
        while number is not None and any(number in held for held in self.known.values()):
            chain.append(key(number))
            number = PARENT_OF.get(number)
        return chain[::-1]


TestAnyOrder = any_order(AnyOrder, 40, 25)


@given(
    st.dictionaries(st.integers(0, 90), st.lists(st.booleans(), min_size=20, max_size=20)),
    st.integers(0, 20),
    st.sampled_from([1, 10]),
)
@settings(max_examples=examples(50), deadline=None)
def test_prefix_match_of_many_instances_equals_the_naive_one(
    holdings: dict[int, list[bool]], length: int, stretch: int
) -> None:
    """Matches equal a naive count, in one or two words of bits. Each run of `stretch` blocks has the same holders."""
    directory = Directory()
    chain = [key(n) for n in range(20 * stretch)]
    names = {number: InstanceId(f"i{number}") for number in holdings}
    for number, has in holdings.items():
        held = [each for place, each in enumerate(chain) if has[place // stretch]]
        changes = Changes(added=pack_keys(held), parents=bytes(16 * len(held)))
        assert directory.apply_changes(names[number], 1, changes, 1, 2, snapshot=False)
    asked = pack_keys(chain[: length * stretch])
    expected = {names[n]: run(has[:length]) * stretch for n, has in holdings.items()}
    assert directory.match(asked) == {name: n for name, n in expected.items() if n}
    directory.validate()
    leading = directory.leading(asked)
    bits = np.array([directory.bit(name) for name in names.values()], np.int64)
    assert leading.runs[bits].tolist() == list(expected.values())
    for block in range(len(leading.slots)):
        has = [held[block // stretch] for held in holdings.values()]
        assert leading.holders(bits, block).tolist() == has
        assert leading.hold(bits, np.full(len(bits), block)).tolist() == has
        assert [leading.has(bit, block) for bit in bits.tolist()] == has
    for bit, has in zip(bits.tolist(), holdings.values(), strict=True):
        for first in range(0, len(leading.slots), stretch):
            end = first + run(has[first // stretch :]) * stretch
            assert leading.end_of_run(bit, first) == min(end, len(leading.slots))


def run(has: list[bool]) -> int:
    return next((n for n, there in enumerate(has) if not there), len(has))
