"""Without processes: the order in which a drained node's objects go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deploy.kvctl.drain_plan import MAX_BYTES, MAX_KEYS, Resident, batches
from kvstore.client import plain_key
from protocol.keys import BlockKey


def key(number: int) -> BlockKey:
    return plain_key(str(number).encode())


def forest_of(shape: list[tuple[int, int, bool]]) -> dict[BlockKey, Resident]:
    """Each object follows the one so many before it, which may be elsewhere; with 0, none."""
    return {
        key(number): Resident(key(number), key(number - back) if back else None, length, in_memory=in_memory)
        for number, (back, length, in_memory) in enumerate(shape)
    }


LENGTHS = st.sampled_from([0, 1, MAX_BYTES // 40, 2 * MAX_BYTES])


@given(st.lists(st.tuples(st.integers(0, 8), LENGTHS, st.booleans()), max_size=200).map(forest_of))
def test_every_object_goes_once_after_its_parent_in_bounded_calls(forest: dict[BlockKey, Resident]) -> None:
    """What is in memory goes first, and a tree goes to one node."""
    asked: list[BlockKey] = []

    def target_of(first: Resident) -> str:
        assert first.parent not in forest
        asked.append(first.key)
        return f"node-{first.key[0] % 3}"

    planned = batches(forest, target_of)
    assert len(asked) == len(set(asked))
    where: dict[BlockKey, str] = {}
    for target, of_one in planned.items():
        assert all(0 < len(batch.objects) <= MAX_KEYS for batch in of_one)
        assert all(b.num_bytes <= MAX_BYTES or len(b.objects) == 1 for b in of_one)
        items = [item for batch in of_one for item in batch.objects]
        assert sorted(items, key=lambda item: not item.in_memory) == items
        for item in items:
            assert item.key not in where
            where[item.key] = target
            parent = None if item.parent is None else forest.get(item.parent)
            if parent is not None and parent.in_memory == item.in_memory:
                assert where[parent.key] == target, "a child before its parent, or elsewhere"
    assert where.keys() == forest.keys()
    for item in forest.values():
        assert item.parent not in forest or where[item.parent] == where[item.key]


def test_a_circle_is_copied_too() -> None:
    circle = {key(n): Resident(key(n), key((n + 1) % 3), 1) for n in range(3)}
    [batch] = batches(circle, lambda first: "node")["node"]
    assert len(batch.objects) == 3
