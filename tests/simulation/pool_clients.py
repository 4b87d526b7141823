"""Simulated clients of a pool: write, read with and without a lease, remove, copy and hint, and verify each value."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moonserve.kvstore.client.blocks import BlockStores
from moonserve.kvstore.index_layout import HEADER, RETIRED_AT, SLOT, SlotFields, entry_of
from moonserve.kvstore.state.allocator import ALIGNMENT
from moonserve.protocol.errors import DeadlineExceeded, MoonserveError, PeerError
from moonserve.protocol.kv_blocks import BlockKey, checksum
from moonserve.protocol.pb import kvstore_pb2, kvstore_pb2_grpc
from moonserve.protocol.request import new_id
from moonserve.protocol.rpc.wire import endpoint_to_wire
from moonserve.transfer import Op, RemoteSegment, ScatterTransfer
from tests.simulation.calls import SimulatedChannels
from tests.simulation.loop import Life
from tests.simulation.processes.stores import PoolNode
from tests.simulation.transfer import SimulatedTransfer
from tests.simulation.truth import SMALLEST

if TYPE_CHECKING:
    from tests.simulation.world import World

NUM_CHAINS, DEPTH = 10, 6
ROOM = 3 * ALIGNMENT  # size of the largest value
PER_S = 25.0  # operations per second of one client
PROBES = 3
CALL_S, LEASE_S, RESERVED_S = 1.0, 2.0, 5.0
RATES = 0.98
"""Share of a lease's duration in which it is certainly valid: the clocks of two processes run at different rates."""
_Slot = kvstore_pb2.StoreReserveReply.Slot
_PINS = (kvstore_pb2.STORE_PIN_NONE, kvstore_pb2.STORE_PIN_SOFT, kvstore_pb2.STORE_PIN_HARD)


class PoolClient:
    """A process that uses a pool at random until the world is calm. `outcomes` counts what it met."""

    def __init__(self, world: "World", name: str) -> None:
        self._world = world
        self._network, self._loop, self._rng = world.network, world.network.loop, world.network.rng
        self.outcomes: Counter[str] = Counter()
        self._life = Life(name, 1, self._rng, self._loop)
        self._channels = SimulatedChannels(world.network, self._life)
        self._transfer = SimulatedTransfer(world.network, self._life, world.engines)
        self._local = self._transfer.allocate(DEPTH * ROOM)
        self._stores = BlockStores(self._channels, self._transfer, attaches=False)  # type: ignore[arg-type]
        self.task = self._life.spawn(self._run())

    async def _run(self) -> None:
        operations = {
            self._put: 50,
            self._get: 30,
            self._peek: 30,
            self._remove: 3,
            self._remove_everywhere: 4,
            self._copy: 4,
            self._hint: 6,
        }
        while not self._world.is_calm:
            await asyncio.sleep(self._rng.expovariate(PER_S))
            [operation] = self._rng.choices(list(operations), list(operations.values()))
            if nodes := self._world.pool_nodes():
                await self._attempt(operation, self._rng.choice(nodes))

    async def _attempt(self, operation: Callable[[PoolNode], Any], node: PoolNode) -> None:
        self._world.note(f"{self._life!r} {operation.__name__} {node.life!r}")
        try:
            await operation(node)
        except MoonserveError as error:
            self.outcomes[error.code] += 1

    def probe(self) -> None:
        """Checks that the pool serves after the faults: what is put can be read."""
        self.task = self._life.spawn(self._probe())

    async def _probe(self) -> None:
        for node in self._world.pool_nodes():
            key = BlockKey(self._life.name.encode().ljust(16))
            try:
                for _ in range(PROBES):  # memory may be fragmented while objects are being written to disk
                    if await self._write(node, [key], tenant=""):
                        break
                    await asyncio.sleep(LEASE_S)
                else:
                    self._problem(f"after all is well {node.life!r} has no room")
                await self._read(node, [key])
            except MoonserveError as error:
                self._problem(f"after all is well: {node.life!r}: {error!r}")

    def _problem(self, what: str) -> None:
        self._world.problem(f"{self._life!r}: {what}")

    async def _call(self, node: PoolNode, method: str, request: Any, *, tries: int = 3) -> Any:
        """Calls a node, with the same arguments on each retry. Raises the node's errors, and PeerLost."""
        stub = kvstore_pb2_grpc.KvStoreStub(self._channels.to(node.address))
        for left in reversed(range(tries)):
            try:
                return await self._channels.call(getattr(stub, method), request, timeout_s=CALL_S)
            except (PeerError, DeadlineExceeded):
                if not left:
                    raise
        raise AssertionError

    def _chain(self) -> list[BlockKey]:
        """Returns the head of a random chain. Some chains are drawn more often than others."""
        chain = 1 + int(NUM_CHAINS * self._rng.random() ** 2)
        return [BlockKey(bytes([chain, depth]).ljust(16, b"\0")) for depth in range(self._rng.randint(1, DEPTH))]

    # Writing

    async def _put(self, node: PoolNode) -> None:
        await self._write(node, self._chain(), tenant=self._rng.choice(["", "", "limited"]))

    async def _write(self, node: PoolNode, keys: Sequence[BlockKey], *, tenant: str) -> int:
        """Writes random values and returns how many of the keys are stored, now or before."""
        rng, truth = self._rng, self._world.truth
        values = [truth.new_value(key, rng.randint(SMALLEST, ROOM)) for key in keys]
        request = kvstore_pb2.StoreReserveRequest(reservation_id=new_id("put"), ttl_s=RESERVED_S)
        pin = _PINS[rng.random() < 0.1]
        for parent, key, value in zip([b"", *keys], keys, values, strict=False):
            request.wishes.add(key=key, parent=parent, length=len(value), tenant=tenant, pin=pin)
        reply = await self._call(node, "Reserve", request)
        outcomes = [slot.outcome for slot in reply.slots]
        granted = [n for n, each in enumerate(outcomes) if each == _Slot.OUTCOME_GRANTED]
        there = outcomes.count(_Slot.OUTCOME_PRESENT)
        if not granted or (not self._world.is_calm and await self._gives_up(node, request)):
            return there
        rows = [(reply.slots[n].offset, n * ROOM, len(values[n])) for n in granted]
        for n in granted:
            self._local.buffer[n * ROOM : n * ROOM + len(values[n])] = values[n]
        if not self._world.is_calm and rng.random() < 0.01:
            self._local.buffer[granted[0] * ROOM] ^= 1
        await self._move(Op.WRITE, node, reply.segment_id, rows, reply.window_id)
        commit = kvstore_pb2.StoreCommitRequest(
            reservation_id=request.reservation_id,
            keys=[keys[n] for n in granted],
            checksums=[checksum([values[n]]) for n in granted],
        )
        corrupt = len((await self._call(node, "Commit", commit)).corrupt)
        self.outcomes["arrived corrupt"] += corrupt
        self.outcomes["stored"] += len(granted) - corrupt
        return there + len(granted) - corrupt

    async def _gives_up(self, node: PoolNode, request: kvstore_pb2.StoreReserveRequest) -> bool:
        """Returns True if the client abandons its reservation, with an abort or, as if it had died, without."""
        chance = self._rng.random()
        if chance < 0.05:
            abort = kvstore_pb2.StoreAbortRequest(reservation_id=request.reservation_id)
            await self._call(node, "Abort", abort)
        return chance < 0.08

    async def _move(
        self, op: Op, node: PoolNode, segment_id: int, rows: list[tuple[int, int, int]], window_id: int | None = None
    ) -> None:
        remote = RemoteSegment(node.transfer.address, segment_id)
        array = np.array(rows, np.int64).reshape(-1, 3)
        transfer = ScatterTransfer(op, self._local, remote, array, window_id)
        await self._transfer.submit([transfer], deadline_s=CALL_S)

    # Reading

    async def _get(self, node: PoolNode) -> None:
        await self._read(node, self._chain())

    async def _read(self, node: PoolNode, keys: Sequence[BlockKey]) -> None:
        asked_at = self._loop.time()
        lease = await self._stores.lease(node.endpoint(), keys, ttl_s=LEASE_S, timeout_s=CALL_S)
        self.outcomes["misses"] += len(keys) - len(lease.objects)
        damaged, objects = self._transfer.num_damaged, lease.objects
        rows = [(o.offset, n * ROOM, o.length) for n, o in enumerate(objects)]
        if objects and self._rng.random() < 0.1:
            asked_at = self._loop.time()
            lease = await self._stores.renew(lease, ttl_s=LEASE_S)
        await self._move(Op.READ, node, lease.segment.segment_id, rows)
        in_time = self._loop.time() < asked_at + LEASE_S * RATES
        for n, stored in enumerate(objects):
            value = bytes(self._local.buffer[n * ROOM : n * ROOM + stored.length])
            if checksum([value]) == stored.checksum:
                self._believe(stored.key, value, "read under a lease")
            elif in_time and damaged == self._transfer.num_damaged:
                self._problem(f"{stored.key.hex()} changed under a lease")
            else:
                self.outcomes["read too late"] += 1
        if self._rng.random() < 0.95 or self._world.is_calm:
            await asyncio.shield(self._stores.release_soon(lease))

    def _believe(self, key: BlockKey, value: bytes, how: str) -> None:
        if wrong := self._world.truth.wrong(key, value):
            self._problem(f"{key.hex()} {how}: {wrong}")
        self.outcomes[how] += 1

    async def _peek(self, node: PoolNode) -> None:
        """Reads without a lease in the node's own memory: the entry, the bytes in two halves, and the entry again."""
        key, index = self._chain()[-1], node.index
        memory = index.memory
        slots = memory[HEADER.size : index.geometry.nbytes]

        def look() -> SlotFields | None:
            found = next((f for f in SLOT.iter_unpack(slots) if f[0] == key and f[2]), None)
            return None if memory[RETIRED_AT] else found

        before = look()
        if before is None or (entry := entry_of(before)).offset is None:
            self.outcomes["nothing to peek at"] += 1
            return
        data = node.memory.buffer[entry.offset : entry.offset + entry.length]
        half = len(data) // 2
        value = bytes(data[:half])
        await asyncio.sleep(self._rng.expovariate(20))
        value += bytes(data[half:])
        await asyncio.sleep(self._rng.expovariate(20))
        if look() != before:
            self.outcomes["changed while peeking"] += 1
        elif checksum([value]) != entry.checksum:
            self._problem(f"{key.hex()} changed behind an unchanged entry")
        else:
            self._believe(key, value, "peeked")
            touch = kvstore_pb2.StoreTouchRequest(keys=key)
            await self._call(node, "Touch", touch, tries=1)

    # Others

    async def _remove(self, node: PoolNode) -> None:
        [key] = self._chain()[-1:]
        until = node.state.catalog.latest_generation
        await self._call(node, "Remove", kvstore_pb2.StoreRemoveRequest(keys=[key]))
        self._world.truth.removed_at(node.life.name, key, until)

    async def _remove_everywhere(self, _: PoolNode) -> None:
        """Removes a key at all nodes that are reachable."""
        [key], removal_id = self._chain()[-1:], self._rng.getrandbits(63) | 1
        self._world.truth.removing(key, removal_id)
        request = kvstore_pb2.StoreRemoveRequest(keys=[key], removal_id=removal_id)
        self.outcomes["removed everywhere"] += 1
        for node in self._world.pool_nodes():
            try:
                await self._call(node, "Remove", request, tries=1)
            except (PeerError, DeadlineExceeded):
                self.outcomes["removed without hearing of it"] += 1

    async def _copy(self, target: PoolNode) -> None:
        others = [node for node in self._world.pool_nodes() if node is not target]
        if not others:
            return
        source = self._rng.choice(others)
        request = kvstore_pb2.StoreCopyRequest(
            source=endpoint_to_wire(source.endpoint()), keys=self._chain(), deadline_s=CALL_S
        )
        self.outcomes["copied"] += (await self._call(target, "Copy", request, tries=1)).copied

    async def _hint(self, node: PoolNode) -> None:
        keys = self._chain()
        if self._rng.random() < 0.7:
            prefetch = kvstore_pb2.StorePrefetchRequest(keys=keys)
            await self._call(node, "Prefetch", prefetch, tries=1)
        else:
            [pin] = self._rng.choices(_PINS, [8, 2, 1])
            request = kvstore_pb2.StorePinRequest(keys=keys[:2], pin=pin)
            await self._call(node, "Pin", request, tries=1)
