"""`kvctl drain`: copies a node's objects to the other nodes, so that it can be stopped without loss.

Rules: the node accepts no new object from the start. Nothing is removed there, so reads continue and the drain can be
interrupted, repeated or undone at any time. It ends when the other nodes themselves report every object. Pins are
copied too.
"""

import asyncio
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence

from moonserve.deploy.admin import kvctl_objects
from moonserve.deploy.admin.kvctl_cluster import Node, StoreCluster, Unreachable, reason
from moonserve.deploy.admin.kvctl_drain_plan import Batch, StoredObject, Survey, TargetNodes, batches, survey
from moonserve.deploy.terminal import EXIT_NOT_FOUND, EXIT_OK, EXIT_USAGE, Output, count, size
from moonserve.protocol.errors import MoonserveError, Overloaded
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.pb import kvstore_pb2
from moonserve.protocol.process.progress_bars import ProgressBars, duration
from moonserve.protocol.rpc.wire import endpoint_to_wire

COPY_DEADLINE_S = 30.0
"""Deadline of one batch; equal to the lifetime of an abandoned reservation."""
CALL_MARGIN_S = 2.0
COPIES_AT_ONCE = 4
WRITERS_POLL_S = 0.5
LISTED = 100


def add_to(verbs: kvctl_objects.Verbs, common: ArgumentParser) -> None:
    help = "copy what only this node holds to others, so that it can be stopped"
    parser = kvctl_objects.add(verbs, "drain", run, common, help)
    parser.add_argument("name", metavar="NODE", help="id or HOST:PORT")
    parser.add_argument("--undo", action="store_true", help="let it accept objects again")


async def run(arguments: Namespace, cluster: StoreCluster, output: Output) -> int:
    [leaving] = await cluster.named([arguments.name])
    if arguments.undo:
        await _set_draining(cluster, leaving, False)
        output.record(node=leaving.name, draining=False)
        output.line(f"{leaving.name} accepts objects again")
        return EXIT_OK
    if cluster.registry is None and len(await cluster.all_nodes()) < 2:
        output.problem("no target nodes: give --registry, or the other nodes as --node HOST:PORT")
        return EXIT_USAGE
    drain = _Drain(cluster, leaving, await TargetNodes.of(cluster, leaving, output), output)
    await _set_draining(cluster, leaving, True)
    try:
        return await drain.run()
    except asyncio.CancelledError:
        output.note(
            f"\ninterrupted: {leaving.name} is still draining and can be read; "
            f"repeat the command to continue, or kvctl drain {leaving.name} --undo"
        )
        raise
    except MoonserveError:
        output.note(f"{leaving.name} is still draining; repeat the command to continue")
        raise


async def _set_draining(cluster: StoreCluster, node: Node, draining: bool) -> None:
    request = kvstore_pb2.StoreSetDrainingRequest(draining=draining)
    await cluster.call(node, node.stub.SetDraining, request)


class _Drain:
    """One run of the command, in passes."""

    def __init__(self, cluster: StoreCluster, leaving: Node, others: TargetNodes, output: Output) -> None:
        self._cluster = cluster
        self._leaving = leaving
        self._others = others
        self._output = output
        self._slots = asyncio.Semaphore(COPIES_AT_ONCE)
        self._moved = self._moved_bytes = 0
        self._gone = 0  # evicted or removed on the leaving node before they were copied
        self._unplaced: set[BlockKey] = set()  # keys that found no place in the last pass
        self._seen = self._seen_bytes = 0  # in this pass
        self._is_waiting = False
        self._why: dict[BlockKey, str] = {}  # reason for each key without a place

    async def run(self) -> int:
        """Returns the exit code. Gives up once a pass leaves no fewer objects than the pass before."""
        started_at = time.monotonic()
        left_before: int | None = None
        while True:
            found = await survey(self._cluster, self._leaving, self._others)
            self._gone += len(self._unplaced - found.alone.keys())
            await self._copy_pins(found.pinned)
            if found.alone:
                if left_before is not None and len(found.alone) >= left_before:
                    return self._give_up(found)
                self._announce(found, is_first=left_before is None)
                left_before = len(found.alone)
                await self._pass(found)
            elif await self._has_writers():
                await asyncio.sleep(WRITERS_POLL_S)
                left_before = None  # those writers add objects
            else:
                return self._finish(time.monotonic() - started_at)

    async def _has_writers(self) -> bool:
        """Returns True while writes that began before the drain may still become objects."""
        request = kvstore_pb2.StoreStatsRequest()
        stats = await self._cluster.call(self._leaving, self._leaving.stub.Stats, request)
        if stats.reserved_bytes and not self._is_waiting:
            self._is_waiting = True
            self._output.note("all is copied; waiting for writes that began before the drain")
        return bool(stats.reserved_bytes)

    def _announce(self, found: Survey, *, is_first: bool) -> None:
        what = f"{count(len(found.alone), 'object')} ({size(found.num_bytes)})"
        if not is_first:
            self._output.note(f"still, or again, only there: {what}")
            return
        self._output.note(f"{self._leaving.name} is draining; only there: {what}")
        room = self._others.room
        if found.num_bytes > room:
            self._output.note(f"the others have room for {size(room)}: they will evict what is cold there")

    async def _pass(self, found: Survey) -> None:
        self._why = {}
        self._unplaced = set(found.alone)
        self._seen = self._seen_bytes = 0
        planned = batches(found.alone, lambda first: self._target_of(first, found))
        with self._output.progress() as progress:
            async with asyncio.TaskGroup() as group:
                for of_one in planned.values():
                    group.create_task(self._place_batches(of_one, found, progress))

    def _target_of(self, first: StoredObject, found: Survey) -> str:
        if first.parent is None:
            return self._others.home(first.key)
        return found.parents_at.get(first.parent) or self._others.home(first.parent)

    async def _place_batches(self, of_one: Iterable[Batch], found: Survey, progress: ProgressBars) -> None:
        """Places the batches for one node in their order, which has parents before children."""
        for batch in of_one:
            async with self._slots:
                left = await self._place(batch)
            gone = {item.key for item in left}
            placed = [item for item in batch.objects if item.key not in gone]
            self._unplaced.difference_update(item.key for item in placed)
            self._moved += len(placed)
            self._moved_bytes += sum(item.length for item in placed)
            self._seen += len(batch.objects)
            self._seen_bytes += batch.num_bytes
            text = (
                f"{self._seen:,} of {count(len(found.alone), 'object')}, "
                f"{size(self._seen_bytes)} of {size(found.num_bytes)}"
            )
            progress.show(f"drain {self._leaving.name}", self._seen_bytes, found.num_bytes, text)

    async def _place(self, batch: Batch) -> Sequence[StoredObject]:
        """Copies a batch to its target or else to other nodes. Returns the objects that no node accepted."""
        left: Sequence[StoredObject] = batch.objects
        for target in self._others.candidates(batch.target):
            left = await self._copy(left, target)
            if not left:
                break
        return left

    async def _copy(self, wanted: Sequence[StoredObject], target: Node) -> Sequence[StoredObject]:
        """Copies objects to a node and returns those that are not on it afterwards. An incomplete batch is repeated one
        by one, so that an object that cannot be copied does not hold up the others."""
        try:
            request = kvstore_pb2.StoreCopyRequest(
                source=endpoint_to_wire(self._leaving.endpoint),
                keys=[item.key for item in wanted],
                deadline_s=COPY_DEADLINE_S,
            )
            timeout_s = COPY_DEADLINE_S + CALL_MARGIN_S
            reply = await self._cluster.call(target, target.stub.Copy, request, timeout_s=timeout_s)
        except (Unreachable, Overloaded) as error:
            return self._refused(wanted, error.message)
        except MoonserveError as error:
            if len(wanted) == 1:
                return self._refused(wanted, f"{target.name}: {reason(error)}")
            return await self._copy_singly(wanted, target)
        if reply.copied + reply.present == len(wanted):
            return ()  # copied with pins; those present without a pin are in the next survey
        if len(wanted) > 1:
            return await self._copy_singly(wanted, target)
        why = "no room there" if reply.refused else "the draining node could not read it"
        return self._refused(wanted, f"{target.name}: {why}")

    async def _copy_singly(self, wanted: Sequence[StoredObject], target: Node) -> Sequence[StoredObject]:
        return [item for one in wanted for item in await self._copy([one], target)]

    def _refused(self, wanted: Sequence[StoredObject], why: str) -> Sequence[StoredObject]:
        self._why |= {item.key: why for item in wanted}
        return wanted

    async def _copy_pins(self, pinned: Sequence[StoredObject]) -> None:
        """Pins replicas on other nodes like the object here, unless one of them has that pin or a stronger one."""
        for item in pinned:
            nodes = list(self._others.nodes.values())
            found = kvctl_objects.present(await kvctl_objects.replicas(self._cluster, nodes, item.key))
            if all(replica.object.pin < item.pin for replica in found):
                pin = kvstore_pb2.StorePin.ValueType(item.pin)
                request = kvstore_pb2.StorePinRequest(keys=[item.key], pin=pin)
                for replica in found:
                    await self._cluster.call(replica.node, replica.node.stub.Pin, request)

    def _finish(self, took_s: float) -> int:
        name = self._leaving.name
        self._record([])
        if self._moved:
            what = f"{count(self._moved, 'object')} ({size(self._moved_bytes)})"
            self._output.line(f"copied {what} in {duration(took_s)}")
        if self._gone:
            self._output.line(f"{count(self._gone, 'object')} left {name} meanwhile, evicted or removed")
        self._output.line(f"{name} holds no object that only it has: it can be stopped")
        return EXIT_OK

    def _give_up(self, found: Survey) -> int:
        unplaced = list(found.alone.values())
        self._record(unplaced)
        shown = unplaced if self._output.long else unplaced[:LISTED]
        for item in shown:
            why = self._why.get(item.key, "it was copied, but has been removed there since")
            self._output.line(f"not placed: {item.key.hex()}  {size(item.length)}  {why}")
        if len(shown) < len(unplaced):
            self._output.line(f"… and {len(unplaced) - len(shown):,} more (--long lists all)")
        self._output.problem(
            f"{count(len(unplaced), 'object')} ({size(found.num_bytes)}) found no place; stopping "
            f"{self._leaving.name} would lose them. It is still draining: make room and repeat the command"
        )
        return EXIT_NOT_FOUND

    def _record(self, unplaced: Sequence[StoredObject]) -> None:
        self._output.record(
            node=self._leaving.name,
            draining=True,
            can_be_stopped=not unplaced,
            copied=self._moved,
            copied_bytes=self._moved_bytes,
            gone=self._gone,
            unplaced=[item.key.hex() for item in unplaced],
        )
