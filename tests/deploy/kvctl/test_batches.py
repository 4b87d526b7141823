"""The order in which a drained node's objects go: parents first, chains together, calls bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deploy.kvctl.batches import (
    MAX_BYTES,
    MAX_KEYS,
    Resident,
    batches,
    first_of_chain,
    in_order,
    waves,
)
from kvstore.client import plain_key
from protocol.keys import BlockKey


def key(number: int) -> BlockKey:
    return plain_key(str(number).encode())


def forest_of(shape: list[tuple[int, int]]) -> dict[BlockKey, Resident]:
    """Each object follows the one so many before it, which may be elsewhere; with 0, none."""
    found: dict[BlockKey, Resident] = {}
    for number, (back, length) in enumerate(shape):
        parent = key(number - back) if back else None
        found[key(number)] = Resident(key(number), parent, length)
    return found


def forests() -> st.SearchStrategy[dict[BlockKey, Resident]]:
    shape = st.tuples(st.integers(0, 8), st.sampled_from([0, 1, MAX_BYTES // 40, 2 * MAX_BYTES]))
    return st.lists(shape, max_size=200).map(forest_of)


@given(forests())
def test_every_object_goes_once_and_after_its_parent(forest: dict[BlockKey, Resident]) -> None:
    planned = batches(in_order(forest), lambda first: f"node-{first.key[0] % 3}")
    for of_one in planned.values():
        done: set[BlockKey] = set()
        for item in [item for batch in of_one for item in batch.objects]:
            assert item.parent not in forest or item.parent in done
            done.add(item.key)
    order = [item.key for of_one in planned.values() for batch in of_one for item in batch.objects]
    assert sorted(order) == sorted(forest)


@given(forests())
def test_a_call_is_bounded_in_objects_and_bytes(forest: dict[BlockKey, Resident]) -> None:
    for batch in batches(in_order(forest), lambda first: "node").get("node", []):
        assert 0 < len(batch.objects) <= MAX_KEYS
        assert batch.num_bytes <= MAX_BYTES or len(batch.objects) == 1


def test_a_tree_goes_to_one_node() -> None:
    chain = {key(n): Resident(key(n), key(n - 1) if n else None, 1) for n in range(200)}
    asked: list[Resident] = []

    def target_of(first: Resident) -> str:
        asked.append(first)
        return "node"

    batches(in_order(chain), target_of)
    assert [first.key for first in asked] == [key(0)]


def test_what_is_in_memory_goes_before_what_must_be_read_there() -> None:
    chain = {
        key(n): Resident(key(n), key(n - 1) if n else None, 1, in_memory=n % 2 == 0)
        for n in range(6)
    }
    first, second = waves(chain)
    assert list(first) == [key(0), key(2), key(4)]
    assert list(second) == [key(1), key(3), key(5)]
    assert {first_of_chain(chain, item).key for item in chain.values()} == {key(0)}
