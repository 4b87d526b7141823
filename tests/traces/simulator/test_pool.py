"""Tests of a machine's part of the pool: it follows its eviction policy, keeps blocks in use, reports changes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey
from moonserve.traces.simulator.cluster.heartbeats_and_samples import block_key_of
from moonserve.traces.simulator.pool import BlockLease, Store
from tests.thoroughness import examples


def chain(*ids: int) -> tuple[BlockKey, ...]:
    return tuple(block_key_of(each) for each in ids)


def stored(num_blocks: int, num_disk_blocks: int, *chains: tuple[BlockKey, ...]) -> Store:
    store = Store(num_blocks, num_disk_blocks, "lru")
    for keys in chains:
        store.put(keys, 0)
    return store


def test_leased_blocks_stay_and_new_blocks_are_refused() -> None:
    store = stored(2, 0, chain(1, 2))
    held = store.hold(chain(1, 2, 3))
    assert len(held) == 2
    store.put(chain(4), 0)
    assert (store.num_refused, store.prefix(chain(1, 2))) == (1, 2)
    store.let_go(held)
    store.put(chain(4), 0)
    assert store.present(chain(1, 2, 4)) == [True, False, True]


def test_blocks_without_room_in_memory_stay_on_disk_until_read() -> None:
    store = stored(2, 2, chain(1, 2), chain(3, 4))
    assert store.present(chain(1, 2, 3, 4)) == [True] * 4
    held = store.hold(chain(1, 2))
    assert held.num_on_disk == 2
    store.let_go(held)
    assert store.hold(chain(1, 2)).num_on_disk < 2


def test_the_end_of_the_chain_that_was_read_longest_ago_goes_first() -> None:
    store = stored(4, 0, chain(1, 2), chain(3, 4))
    store.let_go(store.hold(chain(1, 2)))
    store.put(chain(5), 0)
    assert store.present(chain(1, 2, 3, 4, 5)) == [True, True, True, False, True]
    assert (store.num_evicted, store.prefix(chain(3, 4))) == (1, 1)


@settings(deadline=None, max_examples=examples(30))
@given(
    data=st.data(),
    num_blocks=st.integers(5, 9),
    num_disk=st.sampled_from([0, 0, 3, 12]),
    policy=st.sampled_from(["lru", "lfu", "fifo", "length-aware", "reuse-credit"]),
)
def test_changes_add_up_to_what_is_here(data: st.DataObject, num_blocks: int, num_disk: int, policy: str) -> None:
    """After any puts, overlapping reads and heartbeats, held blocks stay, capacities are kept, and the reported changes
    add up to the contents, with the right parents."""
    store, known, seq = Store(num_blocks, num_disk, policy), {}, 1

    def follow() -> None:
        """Applies changes to `known`, as the conductor does. They come without gaps."""
        nonlocal seq
        if (changes := store.take_changes()) is not None:
            assert changes.first_seq == seq
            known.update(changes.added)
            for key in changes.removed:
                known.pop(key, None)
            seq = changes.next_seq

    reads: list[tuple[tuple[BlockKey, ...], BlockLease]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        # A path in a tree with four branches at each block; a block's id encodes its whole path.
        path = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
        keys = chain(*(int("1" + "".join(map(str, path[: n + 1]))) for n in range(len(path))))
        match data.draw(st.integers(0, 3)):
            case 0:
                store.put(keys, store.prefix(keys))
            case 1:
                reads.append((keys, store.hold(keys)))
            case 2 if reads:
                store.let_go(reads.pop(0)[1])
            case _:
                follow()
        assert all(store.prefix(held_keys) >= len(held) for held_keys, held in reads)
        assert len(store) <= num_blocks + num_disk
        store.validate([held for _, held in reads])
    follow()
    snapshot = store.snapshot()
    assert dict(snapshot.added) == known
    assert snapshot.first_seq == snapshot.next_seq == seq
    for key, parent in known.items():
        number = int.from_bytes(key, "little") - 1
        assert parent == (NO_PARENT if number < 100 else block_key_of(number // 10))
