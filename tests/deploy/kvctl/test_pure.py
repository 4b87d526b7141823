"""Without processes: the order in which a drained node's objects go, and what watch makes of a node's messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deploy.kvctl.drain_plan import (
    MAX_BYTES,
    MAX_KEYS,
    Resident,
    batches,
    first_of_chain,
    in_order,
    waves,
)
from deploy.kvctl.watch import Objects
from kvstore.client import plain_key
from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2

FIRST, SECOND, THIRD = (plain_key(name) for name in (b"1", b"2", b"3"))
MEMORY, DISK = bytes([kvstore_pb2.STORE_TIER_MEMORY]), bytes([kvstore_pb2.STORE_TIER_DISK])


def key(number: int) -> BlockKey:
    return plain_key(str(number).encode())


def forest_of(shape: list[tuple[int, int]]) -> dict[BlockKey, Resident]:
    """Each object follows the one so many before it, which may be elsewhere; with 0, none."""
    found: dict[BlockKey, Resident] = {}
    for number, (back, length) in enumerate(shape):
        found[key(number)] = Resident(key(number), key(number - back) if back else None, length)
    return found


SHAPE = st.tuples(st.integers(0, 8), st.sampled_from([0, 1, MAX_BYTES // 40, 2 * MAX_BYTES]))


@given(st.lists(SHAPE, max_size=200).map(forest_of))
def test_every_object_goes_once_after_its_parent_in_bounded_calls(
    forest: dict[BlockKey, Resident],
) -> None:
    planned = batches(in_order(forest), lambda first: f"node-{first.key[0] % 3}")
    order: list[BlockKey] = []
    for of_one in planned.values():
        done: set[BlockKey] = set()
        for batch in of_one:
            assert 0 < len(batch.objects) <= MAX_KEYS
            assert batch.num_bytes <= MAX_BYTES or len(batch.objects) == 1
            for item in batch.objects:
                assert item.parent not in forest or item.parent in done
                done.add(item.key)
        order += done
    assert sorted(order) == sorted(forest)


def test_a_tree_goes_to_one_node_and_what_is_in_memory_goes_first() -> None:
    chain = {
        key(n): Resident(key(n), key(n - 1) if n else None, 1, in_memory=n % 2 == 0)
        for n in range(200)
    }
    asked: list[BlockKey] = []

    def target_of(first: Resident) -> str:
        asked.append(first.key)
        return "node"

    batches(in_order(chain), target_of)
    assert asked == [key(0)]
    assert [list(wave) for wave in waves(chain)] == [
        [key(n) for n in range(200) if n % 2 == odd] for odd in (0, 1)
    ]
    assert {first_of_chain(chain, item).key for item in chain.values()} == {key(0)}


def changes(objects: Objects, **fields: object) -> list[tuple[str, BlockKey, str]]:
    sent = kvstore_pb2.StoreEvents(**fields)  # type: ignore[arg-type]
    return [(change.what, change.key, change.tier) for change in objects.apply(sent)]


def test_an_inventory_is_no_change_and_replaces_the_one_before() -> None:
    objects = Objects()
    assert not changes(objects, added_keys=FIRST, added_tiers=MEMORY, snapshot=True, more=True)
    assert not changes(objects, added_keys=SECOND, added_tiers=DISK, more=True)
    assert not changes(objects, added_keys=THIRD, added_tiers=DISK)
    assert len(objects) == 3
    assert changes(
        objects, removed_keys=THIRD, added_keys=FIRST, added_tiers=DISK, read_keys=SECOND
    ) == [("moved", FIRST, "disk"), ("removed", THIRD, ""), ("read", SECOND, "")]
    assert not changes(objects, added_keys=THIRD, added_tiers=MEMORY, snapshot=True)
    assert len(objects) == 1
    assert changes(objects, added_keys=FIRST, added_tiers=MEMORY) == [("added", FIRST, "memory")]
