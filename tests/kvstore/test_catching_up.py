"""What a running node does with what it has when the registry had forgotten it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore import catching_up
from kvstore.catching_up import STORE_ROLE, CatchingUp
from kvstore.disk.base import DiskObject
from kvstore.remembering import Remembering
from kvstore.removal_file import PRESENCE_FILE_NAME
from kvstore.removals import Removals
from protocol.keys import BlockKey
from protocol.process import running
from protocol.registry.base import Member
from protocol.registry.embedded import EmbeddedRegistry
from protocol.registry.seat import Seat
from protocol.request import Endpoint
from protocol.rpc import Channels
from tests.kvstore.nodes import TOKEN
from tests.kvstore.test_mover import Node, ignore, node_on
from tests.kvstore.test_remembering import life_in
from tests.patience import came_true


class Alone(CatchingUp):
    """No other node is a member, so nobody has removals to tell. Who is asked what is stored there is a test's; the
    second answer takes until `answering`."""

    def __init__(self, node: Node) -> None:
        remembering = Remembering(node.state, node.mover, Removals(1, 0.0), None, lambda: 1.0, lambda: None)
        super().__init__("store-0", EmbeddedRegistry(), remembering, node.state, Channels(TOKEN))
        self.replaced = False
        self.num_asked = 0
        self.asked_twice = asyncio.Event()
        self.answering = asyncio.Event()

    async def _replaced(self, found: Sequence[DiskObject]) -> set[BlockKey]:
        self.num_asked += 1
        if self.num_asked == 2:
            self.asked_twice.set()
            await self.answering.wait()
        return {about.key for about in found if self.replaced}

    async def compared(self) -> None:
        assert self._comparing is not None
        await self._comparing


async def test_what_was_compared_before_another_absence_is_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
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


class Ignorant(CatchingUp):
    """Nobody knows what was removed meanwhile."""

    rounds = 0

    async def _fence(self, absent_s: float) -> bool:
        return False

    async def _gossip(self) -> None:
        await super()._gossip()
        self.rounds += 1


async def test_what_is_found_on_disk_after_nobody_knew_what_was_removed_goes_too(tmp_path: Path) -> None:
    """The node was away while it still read its disk, all of which could have stayed before."""
    async with node_on(tmp_path) as node:
        node.put(1)
        await node.mover.flush(10.0)
    async with life_in(tmp_path) as life:
        node, channels = life.node, Channels(TOKEN)
        again = Ignorant("store-0", EmbeddedRegistry(), life.remembering, node.state, channels)
        again._may_stay = True
        again._decided.set()
        await again.before_rejoin(60.0)
        node.put(2)
        await node.mover.recover(life.disk, ignore, again)
        assert node.present(range(3)) == [2]
        await again.close()


async def test_who_begins_empty_is_not_noted_as_present_before_the_disk_has_forgotten_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next life would have been away for a moment only, and would take in what nobody could vouch for."""
    monkeypatch.setattr(catching_up, "PULL_EVERY_S", 0.01)
    async with node_on(tmp_path) as node:
        node.put(1)
        await node.mover.flush(10.0)
    async with life_in(tmp_path) as life:
        registry, channels, noted = EmbeddedRegistry(), Channels(TOKEN), tmp_path / PRESENCE_FILE_NAME
        again = Ignorant("store-0", registry, life.remembering, life.node.state, channels)
        endpoint = Endpoint(instance_id="store-0", epoch=0, rpc_address="", transfer_address="", host="")
        seat = Seat(registry, Member(endpoint=endpoint, role=STORE_ROLE, owner="owner"))
        async with running(seat.run()), running(again.run(seat)):
            await came_true(lambda: again.rounds >= 3)
            assert not noted.exists()
            await life.node.mover.recover(life.disk, ignore, again)
            assert life.node.present(range(3)) == []
            await came_true(noted.exists)
        await again.close()
