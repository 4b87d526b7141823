"""Placement of keys by rendezvous hashing, the order in which nodes are searched, and when a key is missing."""

from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.kvstore.client.node_access.node import ClientResources, StoreNode
from moonserve.kvstore.client.node_access.objects import Block, block_of
from moonserve.kvstore.client.placement import ClusterView, LocationHints, NodeSearch, Placement
from moonserve.protocol.errors import NoWorker, PeerLost
from moonserve.protocol.kv_blocks import BlockKey

NAMES = "abcdef"
KEY = block_of(b"key")


def node(name: str, *, here: bool = False) -> StoreNode:
    """Returns a store node that is never attached."""
    return StoreNode(name, name, cast(ClientResources, SimpleNamespace(maps=True)), here=here)


def view_of(*here: str) -> ClusterView:
    return ClusterView.of(node(name, here=name in here) for name in NAMES)


def asked(search: NodeSearch) -> list[str]:
    """Returns the nodes that are searched for the only key, in order, until none is left."""
    names = []
    while groups := search.next_nodes():
        [(each, places)] = groups.items()
        assert places == [0]
        names.append(each.node_id)
    return names


def rank(view: ClusterView, block: Block = KEY) -> list[str]:
    return [each.node_id for each in view.ranked([block.head])[0]]


@pytest.mark.parametrize("near", [(), (3, 4), (0, 3)])
@pytest.mark.parametrize("found_at", [None, 5])
def test_near_nodes_come_first_then_hints_then_home_and_next_rank(near: tuple[int, ...], found_at: int | None) -> None:
    """Near nodes, the last holder, home and the next are searched first; without a directory, all others follow."""
    view, hints = view_of(*(rank(view_of())[place] for place in near)), LocationHints()
    ranked = rank(view)
    if found_at is not None:
        before = NodeSearch([KEY], view, hints)
        before.next_nodes()
        before.found(0, view.ranked([KEY.head])[0][found_at])
        assert not before.next_nodes()
        assert not before.unasked
    search = NodeSearch([KEY], view, hints)
    likely = [*dict.fromkeys([*near, *([] if found_at is None else [found_at]), 0, 1])]
    assert asked(search) == [ranked[place] for place in likely]
    assert search.unasked == [0]
    search.ask_all_nodes()
    assert asked(search) == [name for place, name in enumerate(ranked) if place not in likely]
    assert not search.unasked
    search.raise_lost()


def test_nodes_named_by_the_directory_come_next_least_busy_first() -> None:
    view = view_of()
    search = NodeSearch([KEY], view, LocationHints())
    asked(search)
    holders = view.ranked([KEY.head])[0]
    holders[3].in_flight = 5
    search.locate(0, [holders[0], holders[3], holders[5]])
    assert asked(search) == [holders[5].node_id, holders[3].node_id]


def test_a_key_is_not_missing_while_a_possible_holder_is_unreachable() -> None:
    search = NodeSearch([KEY], view_of(), LocationHints())
    search.next_nodes()
    search.lost(0, PeerLost("gone"))
    asked(search)
    with pytest.raises(PeerLost, match="gone"):
        search.raise_lost()
    search.locate(0, [])
    search.raise_lost()


def test_each_key_of_a_batch_is_searched_until_it_is_found() -> None:
    blocks = [block_of(b"%d" % number) for number in range(20)]
    search = NodeSearch(blocks, view_of(), LocationHints())
    groups = search.next_nodes()
    assert sorted(place for places in groups.values() for place in places) == list(range(20))
    for each, places in groups.items():
        for place in places[1:]:
            search.found(place, each)
    left = [places[0] for places in groups.values()]
    assert search.unasked == sorted(left)
    assert sorted(place for places in search.next_nodes().values() for place in places) == sorted(left)
    with pytest.raises(NoWorker):
        NodeSearch([KEY], ClusterView(), LocationHints())


def test_hints_are_bounded_and_can_be_forgotten() -> None:
    hints = LocationHints(limit=2)
    keys = [block_of(b"%d" % number).key for number in range(3)]
    for key in keys:
        hints.note(key, "a")
    assert [hints.get(key) for key in keys] == [None, None, "a"]
    hints.forget(keys)
    assert hints.get(keys[2]) is None


# Rendezvous hashing: ranks do not depend on node order, shares follow weights, and a change moves as few keys as it can

keys = st.binary(min_size=16, max_size=16).map(BlockKey)
weights = st.dictionaries(st.text(min_size=1, max_size=8), st.floats(0.1, 1e12), min_size=1, max_size=12)


def ranked(key: BlockKey, nodes: dict[str, float]) -> list[str]:
    """Returns the ids of all nodes in rank order, home first."""
    placement = Placement(nodes)
    return [placement.ids[place] for place in placement.ranked([key])[0]]


@given(keys, weights, st.data())
def test_a_rank_holds_every_node_once_in_an_order_that_depends_on_no_other_node(
    key: BlockKey, nodes: dict[str, float], data: st.DataObject
) -> None:
    rank, backwards = ranked(key, nodes), dict(reversed(nodes.items()))
    assert sorted(rank) == sorted(nodes)
    assert rank == ranked(key, backwards)
    assert Placement(nodes).ranked([key, key])[1] == Placement(nodes).ranked([key])[0]
    gone = data.draw(st.sampled_from(sorted(nodes)))
    rest = {node: weight for node, weight in nodes.items() if node != gone}
    assert ranked(key, rest) == [node for node in rank if node != gone]


def test_nodes_get_shares_by_their_weights_also_of_small_numbers_as_keys() -> None:
    placement = Placement(nodes := {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0})
    homes = placement.ranked([BlockKey(number.to_bytes(16, "little")) for number in range(8000)])
    shares = Counter(placement.ids[home] for home, *_ in homes)
    for node, weight in nodes.items():
        assert shares[node] / 8000 == pytest.approx(weight / 8, rel=0.1)
