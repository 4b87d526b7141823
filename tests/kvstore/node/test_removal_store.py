"""Removals count as executed once the removed objects cannot come back: tests over a real folder and disk, also with a
running node that the registry had forgotten.

A disk in recovery records no removals, so each removal waits at a point where the node may be killed. A copy of the
folder at this point stands for a killed node.
"""

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from moonserve.kvstore.disk.base import DiskObject
from moonserve.kvstore.disk.recovery import Found
from moonserve.kvstore.disk.tier import SsdTier
from moonserve.kvstore.node import catch_up
from moonserve.kvstore.node.catch_up import CatchUp
from moonserve.kvstore.node.removal_store import LAST_CONTACT_FILE_NAME, REMOVALS_FILE_NAME, RemovalFile, RemovalStore
from moonserve.kvstore.state.removals import RemovalLog, ReportedRemoval
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.membership.registry import Member
from moonserve.protocol.membership.registry.embedded import EmbeddedRegistry
from moonserve.protocol.membership.registry.lease import RegistryLease
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.request import Endpoint
from moonserve.protocol.rpc.grpc_transport import Channels
from tests.kvstore.node.nodes import TOKEN, key
from tests.kvstore.node.test_tier_mover import Node, ignore, node_on, with_disk
from tests.patience import came_true

REMOVAL = 7


@dataclass
class Life:
    """One life of a node in a folder. Its disk is not recovered before `recover` is called."""

    node: Node
    disk: SsdTier
    remembering: RemovalStore

    async def recover(self) -> None:
        await self.node.mover.recover(self.disk, ignore)

    async def remove(self, number: int) -> int:
        return await self.remembering.remove([key(number)], REMOVAL)

    async def at_rest(self) -> None:
        """Waits until everything that does not depend on the disk is written."""
        await asyncio.sleep(0)
        await self.remembering.save_contact()


@asynccontextmanager
async def life_in(folder: Path) -> AsyncIterator[Life]:
    node, disk = await with_disk(folder)
    remembering = RemovalStore(node.state, node.mover, RemovalLog(1, 0.0), folder, lambda: 1.0, lambda: None)
    await remembering.load(is_first_life=False)
    life = Life(node, disk, remembering)
    yield life
    if node.mover.recovered < 1:
        await life.recover()
    await remembering.close()
    await node.mover.close()


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """The folder of a stopped node with objects 0 to 3 on its disk."""
    async with node_on(tmp_path / "node") as node:
        for number in range(4):
            node.put(number)
        await node.mover.flush(10.0)
    return tmp_path / "node"


def killed(folder: Path) -> Path:
    """Returns a copy of the folder, as if the node were killed now."""
    return Path(shutil.copytree(folder, folder.with_name("killed")))


def kept(folder: Path) -> set[int]:
    """Returns the ids of the removals that the next life treats as executed."""
    return {record.removal_id for record in RemovalFile(folder).load()}


async def present_after(folder: Path) -> list[int]:
    async with node_on(folder) as node:
        return node.present(range(4))


async def test_a_removal_unsaved_at_a_crash_is_executed_by_the_next_attempt(folder: Path) -> None:
    async with life_in(folder) as life:
        removing = asyncio.create_task(life.remove(1))
        await life.at_rest()
        assert not removing.done()
        left = killed(folder)
        await life.recover()
        await removing
    assert kept(left) == set()
    async with life_in(left) as next_life:
        await next_life.recover()
        assert await next_life.remove(1) == 1
    assert await present_after(left) == [0, 2, 3]
    assert kept(left) == {REMOVAL}


async def test_a_removal_just_before_its_object_is_found_takes_it(folder: Path) -> None:
    async with life_in(folder) as life:
        removals: list[asyncio.Task[int]] = []
        recover = life.disk.recover

        async def found(progress: Callable[[float], None]) -> AsyncIterator[Found]:
            async for batch in recover(progress):
                removals.append(asyncio.create_task(life.remove(1)))
                await asyncio.sleep(0)  # executed before the object is known
                yield batch

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(life.disk, "recover", found)
            await life.recover()
        await asyncio.gather(*removals)
        assert life.node.present(range(4)) == [0, 2, 3]
    assert await present_after(folder) == [0, 2, 3]


async def test_a_repeated_removal_waits_for_the_first_and_changes_nothing(folder: Path) -> None:
    async with life_in(folder) as life:
        first, again = (asyncio.create_task(life.remove(1)) for _ in range(2))
        await life.at_rest()
        assert not first.done()
        assert not again.done()
        await life.recover()
        assert await first == await again
        life.node.put(1)
        await life.remove(1)
        assert life.node.present(range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("origin", ["learned", "caller cancelled"])
async def test_a_removal_is_saved_after_the_disk_has_forgotten(folder: Path, origin: str) -> None:
    async with life_in(folder) as life:
        assert life.remembering.is_saved
        if origin == "learned":
            await life.remembering.learn([ReportedRemoval(key(1), REMOVAL, 0.0)])
            await life.at_rest()
        else:
            removing = asyncio.create_task(life.remove(1))
            await life.at_rest()
            removing.cancel()
            await asyncio.gather(removing, return_exceptions=True)
        assert not life.remembering.is_saved
        left = killed(folder)
        await life.recover()
    assert kept(left) == set()
    assert await present_after(folder) == [0, 2, 3]
    assert kept(folder) == {REMOVAL}


async def test_the_file_is_rewritten_without_unsaved_removals(folder: Path) -> None:
    """A rewrite of the file, as after a failed append, omits removals that the disk has not recorded."""
    async with life_in(folder) as life:
        life.remembering.removals.execute([key(2)], 5, 0.0)
        removing = asyncio.create_task(life.remove(1))
        await life.at_rest()
        await life.remembering.load(is_first_life=False)
        assert kept(folder) == {5}
        await life.recover()
        await removing
        assert kept(folder) == {5, REMOVAL}


@pytest.mark.parametrize("evicted", [False, True])
async def test_a_copy_made_before_its_removal_is_learned_stays_removed(tmp_path: Path, evicted: bool) -> None:
    """A removal learned late removes a copy made since, although its generation is later; a new object stays."""
    async with life_in(tmp_path) as life:
        await life.recover()
        life.node.put(1, second_hand=True)
        life.node.put(2)
        assert await life.node.mover.flush(10.0) == 0
        if evicted:  # without notifying the disk
            life.node.state.remove([key(1)], corrupt=False)
        removed = [ReportedRemoval(key(number), REMOVAL, 10.0) for number in (1, 2)]
        assert await life.remembering.learn(removed) == (not evicted)
    assert await present_after(tmp_path) == [2]


async def test_older_pages_behind_a_torn_record_do_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, append = Node(), RemovalFile.append
    remembering = RemovalStore(node.state, node.mover, RemovalLog(1, 0.0), tmp_path, lambda: 1.0, lambda: None)
    await remembering.load(is_first_life=False)

    def torn(file: RemovalFile, removals: list[tuple[BlockKey, int, float]]) -> None:
        append(file, removals)
        if failures:
            os.truncate(tmp_path / REMOVALS_FILE_NAME, (tmp_path / REMOVALS_FILE_NAME).stat().st_size - 1)
            raise failures.pop()

    failures = [OSError(errno.ENOSPC, "no room, until the next attempt")]
    monkeypatch.setattr(RemovalFile, "append", torn)
    await asyncio.gather(*(remembering.remove([key(n)], n) for n in (1, 2)))
    await remembering.remove([key(3)], 3)
    await remembering.close()
    assert kept(tmp_path) == {1, 2, 3}


class Alone(CatchUp):
    """Catches up without other members, so that there are no removals to learn. The test answers which objects were
    replaced elsewhere; the second answer waits for `answering`."""

    def __init__(self, node: Node) -> None:
        remembering = RemovalStore(node.state, node.mover, RemovalLog(1, 0.0), None, lambda: 1.0, lambda: None)
        super().__init__("store-0", EmbeddedRegistry(), remembering, node.state, Channels(TOKEN))
        self.replaced = False
        self.num_asked = 0
        self.asked_twice = asyncio.Event()
        self.answering = asyncio.Event()

    async def _replaced_keys(self, found: Sequence[DiskObject]) -> set[BlockKey]:
        self.num_asked += 1
        if self.num_asked == 2:
            self.asked_twice.set()
            await self.answering.wait()
        return {about.key for about in found if self.replaced}

    async def compared(self) -> None:
        assert self._comparing is not None
        await self._comparing


async def test_objects_are_compared_again_after_another_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "COMPARED_AT_ONCE", 1)
    monkeypatch.setattr(catch_up, "COMPARE_S", 0.0)
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


class Ignorant(CatchUp):
    """Catches up with members that do not know the removals of the absence."""

    rounds = 0

    async def _learn_absence(self, absent_s: float) -> bool:
        return False

    async def _gossip(self) -> None:
        await super()._gossip()
        self.rounds += 1


async def test_objects_found_after_an_unknown_absence_are_dropped(folder: Path) -> None:
    async with life_in(folder) as life:
        node, channels = life.node, Channels(TOKEN)
        again = Ignorant("store-0", EmbeddedRegistry(), life.remembering, node.state, channels)
        again._may_stay = True  # all of them, before this absence
        again._decided.set()
        await again.before_rejoin(60.0)
        node.put(4)
        await node.mover.recover(life.disk, ignore, again)
        assert node.present(range(5)) == [4]
        await again.close()


async def test_a_node_that_begins_empty_saves_no_contact_before_its_disk_is_empty(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that starts empty records no presence until its disk has forgotten all, lest its next life restore it."""
    monkeypatch.setattr(catch_up, "PULL_EVERY_S", 0.01)
    async with life_in(folder) as life:
        registry, channels, noted = EmbeddedRegistry(), Channels(TOKEN), folder / LAST_CONTACT_FILE_NAME
        again = Ignorant("store-0", registry, life.remembering, life.node.state, channels)
        endpoint = Endpoint(instance_id="store-0", epoch=0, rpc_address="", transfer_address="", host="")
        seat = RegistryLease(registry, Member(endpoint=endpoint, role="store", owner="owner"))
        async with background_task(seat.run()), background_task(again.run(seat)):
            await came_true(lambda: again.rounds >= 3)
            assert not noted.exists()
            await life.node.mover.recover(life.disk, ignore, again)
            assert life.node.present(range(4)) == []
            await came_true(noted.exists)
        await again.close()
