"""What a running node compares with the others when the registry had forgotten it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvstore import catching_up
from kvstore.catching_up import CatchingUp
from kvstore.disk.base import DiskObject
from kvstore.remembering import Remembering
from kvstore.removals import Removals
from protocol.keys import BlockKey
from protocol.registry.embedded import EmbeddedRegistry
from protocol.rpc import Channels
from tests.kvstore.nodes import TOKEN
from tests.kvstore.test_mover import Node


class Alone(CatchingUp):
    """No other node is a member, so nobody has removals to tell. Who is asked what is stored there is a test's; the
    second answer takes until `answering`."""

    def __init__(self, node: Node) -> None:
        remembering = Remembering(
            node.state, node.mover, Removals(1, 0.0), None, lambda: 1.0, lambda: None
        )
        super().__init__("store-0", EmbeddedRegistry(), remembering, node.state, Channels(TOKEN))
        self.replaced = False
        self.num_asked = 0
        self.asked_twice = asyncio.Event()
        self.answering = asyncio.Event()

    async def outdated(self, found: Sequence[DiskObject]) -> set[BlockKey]:
        self.num_asked += 1
        if self.num_asked == 2:
            self.asked_twice.set()
            await self.answering.wait()
        return {about.key for about in found if self.replaced}

    async def compared(self) -> None:
        assert self._comparing is not None
        await self._comparing


async def test_what_was_compared_before_another_absence_is_compared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catching_up, "COMPARED_AT_ONCE", 1)
    monkeypatch.setattr(catching_up, "COMPARE_S", 0.0)
    node = Node()
    for number in range(2):
        node.put(number)
    again = Alone(node)
    await again.before_rejoin(60.0)
    await again.asked_twice.wait()
    again.replaced = True
    await again.before_rejoin(60.0)
    again.answering.set()
    await again.compared()
    assert node.present(range(2)) == []
    await again.close()
