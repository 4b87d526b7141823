"""Tiers and parents in the index agree with a naive model, whatever the order of messages, tiers and sweeps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.directory import Changes, Directory
from kvstore.directory.chains import MAX_CHAIN, Chains
from protocol.errors import InvalidRequest
from protocol.ids import InstanceId
from protocol.keys import NO_PARENT, BlockKey, pack_keys
from tests.thoroughness import examples

A, B = InstanceId("a"), InstanceId("b")
PARENT_OF = {1: 0, 2: 1, 3: 2, 4: 2, 5: 0, 6: 5, 7: 3}  # two branches below 2, two below 0


def key(number: int) -> BlockKey:
    return BlockKey((number + 1).to_bytes(16, "little"))


KEYS = [key(number) for number in range(8)]


def parent_of(number: int) -> BlockKey:
    return key(PARENT_OF[number]) if number in PARENT_OF else NO_PARENT


class Fed:
    """A directory that is told of blocks one message at a time."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.chains = Chains(self.directory)

    def hold(self, name: InstanceId, *numbers: int, in_memory: bool = True) -> None:
        changes = Changes(
            added=pack_keys([key(n) for n in numbers]),
            parents=pack_keys([parent_of(n) for n in numbers]),
            in_memory=bytes([in_memory]) * len(numbers),
        )
        self.take(name, changes)

    def move(self, name: InstanceId, number: int, *, in_memory: bool) -> None:
        """Says only the new tier."""
        changes = Changes(added=key(number), parents=NO_PARENT, in_memory=bytes([in_memory]))
        self.take(name, changes)

    def lose(self, name: InstanceId, *numbers: int) -> None:
        self.take(name, Changes(removed=pack_keys([key(n) for n in numbers])))

    def take(self, name: InstanceId, changes: Changes) -> None:
        seq = max(1, self.directory.next_seq(name))
        assert self.directory.take(name, 1, changes, seq, seq + 1, snapshot=False)
        self.directory.validate()


def test_a_chain_is_found_from_its_last_block_also_when_children_came_first() -> None:
    fed = Fed()
    for number in (7, 3, 2, 1, 0):
        fed.hold(A, number)
    assert fed.chains.to(key(7)) == [key(n) for n in (0, 1, 2, 3, 7)]
    assert fed.chains.to(key(99)) == []
    assert fed.chains.parent(key(7)) == key(3)
    assert fed.chains.parent(key(0)) is None


def test_a_chain_ends_where_nobody_holds_its_parent_and_is_whole_again_when_it_comes_back() -> None:
    fed = Fed()
    fed.hold(A, 0, 1, 2, 3)
    fed.lose(A, 1)
    assert fed.chains.to(key(3)) == [key(2), key(3)]
    assert fed.directory.holders(key(1)) == []
    fed.hold(B, 1)
    assert fed.chains.to(key(3)) == [key(n) for n in (0, 1, 2, 3)]


def test_a_change_of_tier_without_a_parent_keeps_the_parent() -> None:
    fed = Fed()
    fed.hold(A, 0, 1)
    fed.move(A, 1, in_memory=False)
    assert fed.chains.to(key(1)) == [key(0), key(1)]
    assert fed.directory.match(pack_keys(KEYS[:2])) == {A: (2, 1)}
    assert fed.directory.memory_lengths(KEYS[:2]) == {A: 1}
    assert fed.directory.num_in_memory(A) == 1


def test_what_follows_on_a_block_is_told_per_node() -> None:
    fed = Fed()
    fed.hold(A, 0, 1, 2, 3, 4)
    fed.hold(B, 2, 3)
    found = fed.chains.continued([key(2), key(4)], A)
    assert {parent: sorted(children) for parent, children in found.items()} == {
        key(2): [key(3), key(4)]
    }
    assert fed.chains.continued([key(2)], B) == {key(2): [key(3)]}


def test_a_circle_of_parents_ends() -> None:
    fed = Fed()
    fed.take(A, Changes(added=key(0) + key(1), parents=key(1) + key(0), in_memory=b"\1\1"))
    assert len(fed.chains.to(key(0))) == MAX_CHAIN
    fed.lose(A, 0, 1)
    assert len(fed.directory) == 0


@pytest.mark.parametrize(
    "changes",
    [
        Changes(added=bytes(15), parents=bytes(15)),
        Changes(added=bytes(16)),
        Changes(added=bytes(16), parents=bytes(16), in_memory=bytes(2)),
        Changes(removed=bytes(17)),
    ],
)
def test_changes_that_contradict_themselves_are_refused_and_change_nothing(
    changes: Changes,
) -> None:
    directory = Directory()
    with pytest.raises(InvalidRequest):
        directory.take(A, 1, changes, 1, 2, snapshot=False)
    assert directory.next_seq(A) == 0


def test_an_inventory_in_pieces_replaces_what_was_known() -> None:
    fed = Fed()
    fed.hold(A, 5, 6)
    for number, first in ((0, True), (1, False), (2, False)):
        changes = Changes(added=key(number), parents=parent_of(number))
        assert fed.directory.take(A, 1, changes, 9, 9, snapshot=first)
    assert fed.directory.prefix_lengths(KEYS) == {A: 3}
    assert fed.directory.num_blocks(A) == 3
    assert fed.directory.next_seq(A) == 9
    fed.directory.validate()


def test_a_key_that_is_named_twice_counts_once() -> None:
    fed = Fed()
    twice = key(0) * 2
    fed.take(A, Changes(added=twice, parents=bytes(32)))
    assert fed.directory.num_blocks(A) == 1
    fed.take(A, Changes(removed=twice))
    assert fed.directory.num_blocks(A) == len(fed.directory) == 0


class TiersAndParents(RuleBasedStateMachine):
    """70 instances in two words of bits, of which some come and go."""

    names = st.integers(0, 69).map(lambda n: InstanceId(f"i{n}"))
    numbers = st.integers(0, 7)

    def __init__(self) -> None:
        super().__init__()
        self.fed = Fed()
        self.model: dict[InstanceId, dict[int, bool]] = {}
        for n in range(62):
            self.holds(InstanceId(f"i{n}"), [n % 3], True)

    @rule(name=names, numbers=st.lists(numbers, unique=True), in_memory=st.booleans())
    def holds(self, name: InstanceId, numbers: list[int], in_memory: bool) -> None:
        self.fed.hold(name, *numbers, in_memory=in_memory)
        self.model.setdefault(name, {}).update(dict.fromkeys(numbers, in_memory))

    @rule(name=names, numbers=st.lists(numbers, unique=True))
    def loses(self, name: InstanceId, numbers: list[int]) -> None:
        self.fed.lose(name, *numbers)
        for number in numbers:
            self.model.setdefault(name, {}).pop(number, None)

    @rule(name=names)
    def is_dropped(self, name: InstanceId) -> None:
        self.fed.directory.drop(name)
        self.model.pop(name, None)

    @rule()
    def sweeps(self) -> None:
        self.fed.directory._sweep()

    @invariant()
    def agrees_with_the_model(self) -> None:
        directory = self.fed.directory
        directory.validate()
        for number in range(8):
            expected = {n: held[number] for n, held in self.model.items() if number in held}
            assert dict(directory.locate(key(number))) == expected
            assert self.fed.chains.to(key(number)) == self._chain(number)
        for name, held in self.model.items():
            assert directory.num_in_memory(name) == sum(held.values())
        assert len(directory.match(pack_keys(KEYS))) == sum(0 in h for h in self.model.values())

    def _chain(self, number: int | None) -> list[BlockKey]:
        chain: list[BlockKey] = []
        while number is not None and any(number in held for held in self.model.values()):
            chain.append(key(number))
            number = PARENT_OF.get(number)
        return chain[::-1]


TestTiersAndParents = TiersAndParents.TestCase
TestTiersAndParents.settings = settings(
    max_examples=examples(40), stateful_step_count=25, deadline=None
)


@given(
    st.dictionaries(st.integers(0, 90), st.lists(st.sampled_from("-dm"), min_size=20, max_size=20)),
    st.integers(0, 20),
    st.sampled_from([1, 10]),
)
@settings(max_examples=examples(50), deadline=None)
def test_runs_of_short_and_long_chains_in_one_and_two_words_equal_the_naive_ones(
    holdings: dict[int, list[str]], length: int, stretch: int
) -> None:
    """`stretch` blocks in a row are held alike."""
    directory = Directory()
    chain = [key(n) for n in range(20 * stretch)]
    for number, tiers in holdings.items():
        stretched = [tier for tier in tiers for _ in range(stretch)]
        held = [(k, tier) for k, tier in zip(chain, stretched, strict=True) if tier != "-"]
        changes = Changes(
            added=pack_keys([k for k, _ in held]),
            parents=bytes(16 * len(held)),
            in_memory=bytes(tier == "m" for _, tier in held),
        )
        assert directory.take(InstanceId(f"i{number}"), 1, changes, 1, 2, snapshot=False)
    expected = {
        InstanceId(f"i{number}"): (
            leading(tiers[:length], "dm") * stretch,
            leading(tiers[:length], "m") * stretch,
        )
        for number, tiers in holdings.items()
    }
    wanted = {name: both for name, both in expected.items() if both[0]}
    assert directory.match(pack_keys(chain[: length * stretch])) == wanted
    directory.validate()


def leading(tiers: list[str], counted: str) -> int:
    return next((n for n, tier in enumerate(tiers) if tier not in counted), len(tiers))
