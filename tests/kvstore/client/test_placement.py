"""Rendezvous hashing: everybody agrees, shares follow weights, and only what must move moves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.placement import Placement
from protocol.keys import BlockKey

keys = st.binary(min_size=16, max_size=16).map(BlockKey)
weights = st.dictionaries(st.text(min_size=1, max_size=8), st.floats(0.1, 1e12), min_size=1, max_size=12)


def ranked(key: BlockKey, nodes: dict[str, float]) -> list[str]:
    """The ids of all nodes, home first."""
    placement = Placement(nodes)
    return [placement.ids[place] for place in placement.ranked([key])[0]]


@given(keys, weights)
def test_a_rank_holds_every_node_once_and_does_not_depend_on_their_order(
    key: BlockKey, nodes: dict[str, float]
) -> None:
    backwards = dict(reversed(nodes.items()))
    assert sorted(ranked(key, nodes)) == sorted(nodes)
    assert ranked(key, nodes) == ranked(key, backwards)
    assert Placement(nodes).ranked([key, key])[1] == Placement(nodes).ranked([key])[0]


@given(keys, weights, st.data())
def test_without_one_node_the_others_keep_their_order(
    key: BlockKey, nodes: dict[str, float], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(nodes)))
    before = [node for node in ranked(key, nodes) if node != gone]
    rest = {node: weight for node, weight in nodes.items() if node != gone}
    assert ranked(key, rest) == before


def test_nodes_get_shares_by_their_weights_also_of_small_numbers_as_keys() -> None:
    placement = Placement(nodes := {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0})
    homes = placement.ranked([BlockKey(number.to_bytes(16, "little")) for number in range(8000)])
    shares = Counter(placement.ids[home] for home, *_ in homes)
    for node, weight in nodes.items():
        assert shares[node] / 8000 == pytest.approx(weight / 8, rel=0.1)
