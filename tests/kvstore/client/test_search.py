"""Whom to ask for keys in which order, and when a key is missing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from kvstore.client.cluster import View
from kvstore.client.keys import Block, block_of
from kvstore.client.node import Means, StoreNode
from kvstore.client.search import Hints, Search
from protocol.errors import NoWorker, PeerLost

NAMES = "abcdef"
KEY = block_of(b"key")


def node(name: str, *, here: bool = False) -> StoreNode:
    """Never attached."""
    return StoreNode(name, name, cast(Means, SimpleNamespace(maps=True)), here=here)


def view_of(*here: str) -> View:
    return View.of(node(name, here=name in here) for name in NAMES)


def asked(search: Search) -> list[str]:
    """The nodes that are asked for the only key, until nobody is left."""
    names = []
    while groups := search.groups():
        [(each, places)] = groups.items()
        assert places == [0]
        names.append(each.node_id)
    return names


def rank(view: View, block: Block = KEY) -> list[str]:
    return [each.node_id for each in view.ranked([block.head])[0]]


def test_home_comes_first_and_the_next_rank_second() -> None:
    view = view_of()
    search = Search([KEY], view, Hints())
    assert asked(search) == rank(view)[:2]
    assert search.unasked == [0]


def test_nodes_on_this_host_come_before_home() -> None:
    near = rank(view_of())[3:5]
    view = view_of(*near)
    assert asked(Search([KEY], view, Hints())) == [*near, *rank(view)[:2]]


def test_where_it_was_found_before_comes_before_home() -> None:
    view, hints = view_of(), Hints()
    before = view.ranked([KEY.head])[0][4]
    search = Search([KEY], view, hints)
    search.groups()
    search.found(0, before)
    again = Search([KEY], view, hints)
    assert asked(again) == [before.node_id, *rank(view)[:2]]


def test_without_a_directory_everybody_is_asked_once() -> None:
    view = view_of()
    search = Search([KEY], view, Hints())
    first = asked(search)
    search.ask_everybody()
    assert first + asked(search) == rank(view)
    assert not search.unasked
    search.raise_lost()


def test_the_directory_decides_who_is_asked_next() -> None:
    view = view_of()
    search = Search([KEY], view, Hints())
    asked(search)
    holders = view.ranked([KEY.head])[0]
    search.locate(0, [holders[0], holders[5], holders[3]])
    assert set(asked(search)) == {holders[5].node_id, holders[3].node_id}


def test_the_least_busy_holder_is_preferred() -> None:
    view = view_of()
    search = Search([KEY], view, Hints())
    asked(search)
    busy, idle = view.ranked([KEY.head])[0][3:5]
    busy.in_flight = 5
    search.locate(0, [busy, idle])
    assert asked(search) == [idle.node_id, busy.node_id]


def test_a_key_is_not_missing_while_somebody_who_may_have_it_is_out_of_reach() -> None:
    view = view_of()
    search = Search([KEY], view, Hints())
    search.groups()
    search.lost(0, PeerLost("gone"))
    asked(search)
    with pytest.raises(PeerLost, match="gone"):
        search.raise_lost()
    search.locate(0, [])
    search.raise_lost()


def test_what_is_found_is_asked_for_no_more() -> None:
    view = view_of()
    blocks = [block_of(b"%d" % number) for number in range(20)]
    search = Search(blocks, view, Hints())
    groups = search.groups()
    assert sorted(place for places in groups.values() for place in places) == list(range(20))
    for each, places in groups.items():
        for place in places:
            search.found(place, each)
    assert not search.groups()
    assert not search.unasked


def test_a_cluster_without_nodes_is_an_error() -> None:
    with pytest.raises(NoWorker):
        Search([KEY], View(), Hints())


def test_hints_forget_the_oldest_first() -> None:
    hints = Hints(limit=2)
    keys = [block_of(b"%d" % number).key for number in range(3)]
    for key in keys:
        hints.note(key, "a")
    assert [hints.get(key) for key in keys] == [None, "a", "a"]
    hints.forget(keys)
    assert [hints.get(key) for key in keys] == [None, None, None]
