"""A pass over a node's objects while they change."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from kvstore import verification
from kvstore.verification import Verifier
from tests.kvstore.test_mover import SIZE, Node, key, value
from transfer import Segment


async def test_what_is_stored_in_place_of_a_rotten_object_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "PIECE_BYTES", 0)  # all of them are compared in threads
    node, checked = Node(), 0
    node.put(1)
    node.put(2)
    node.memory[:SIZE] = value(3)

    async def in_thread(work: Callable[[], bool]) -> bool:
        nonlocal checked
        checked += 1
        if checked == 2:  # a reader has found it, too, and it was stored anew
            node.state.remove([key(1)], corrupt=True)
            node.put(1, value(4))
        return work()

    segment = cast(Segment, SimpleNamespace(buffer=node.memory))
    replies = [reply async for reply in Verifier(node.state, node.mover, segment, in_thread).run()]
    assert [list(reply.corrupt) for reply in replies] == [[key(1)]]
    assert node.present(range(3)) == [1, 2]
    node.state.validate()
