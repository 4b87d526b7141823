"""Nodes, clients and a directory in virtual time, over a network that delays and loses, with crashes. Seeded.

Everything but hardware and network is the product: node states, indexes, event logs, directory. A client's call is a
generator that yields what it waits for. No wrong value may ever be taken for a right one; whoever checks says so by
AssertionError.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Generator
from typing import Any

from kvstore.allocator import ALIGNMENT
from kvstore.disk.base import Pin
from kvstore.native.layout import entry_of
from kvstore.promises import Wish
from kvstore.stored import StoredObject
from protocol.errors import InvalidRequest, StaleLease
from protocol.keys import BlockKey
from tests.kvstore.simulated_directory import SimulatedDirectory
from tests.kvstore.simulated_node import SimulatedNode
from tests.kvstore.simulated_removals import Truth

NUM_NODES, NUM_CLIENTS = 3, 16
NUM_CHAINS, DEPTH = 10, 6
CHECK_EVERY = 100  # operations
TIMEOUT_S, LEASE_TTL_S = 1.0, 2.0
LOSS = 0.01
LAST_EVENTS = 50
SETTLE_S = 60.0  # until reservations have expired and streams have caught up

Wait = Callable[[Callable[[Any], None]], None]
"""Begins to wait; calls what it is given with the result."""
Process = Generator[Wait, Any, None]


class Lost(Exception):
    """No answer, or the node died meanwhile."""


def key_of(chain: int, depth: int) -> BlockKey:
    return BlockKey(bytes([chain + 1, depth]).ljust(16, b"\0"))


class Simulation:
    """One seed's world."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.rng = random.Random(seed)
        self.num_operations = 0
        self.outcomes: Counter[str] = Counter()
        self.trace: deque[tuple[object, ...]] = deque(maxlen=LAST_EVENTS)
        self.calm = False  # nothing is lost, nobody crashes, clients stop
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = itertools.count()
        self._ids = itertools.count(1)
        self.truth = Truth()
        self.nodes: list[SimulatedNode] = []
        self.nodes += [SimulatedNode(self, f"store-{n}") for n in range(NUM_NODES)]
        self.directory = SimulatedDirectory(self, self.nodes)
        for _ in range(NUM_CLIENTS):
            self.spawn(self._client())
        self.later(1.0, self._disturb)

    # Time and network

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._ties), action))

    def note(self, *what: object) -> None:
        self.trace.append((f"{self.now:.4f}", *what))

    def latency(self) -> float:
        """Mostly a fraction of a millisecond, now and then longer than a lease lasts."""
        return self.rng.expovariate(2000) if self.rng.random() < 0.99 else self.rng.uniform(0, 4)

    def spawn(self, process: Process, is_alive: Callable[[], bool] = lambda: True) -> None:
        def resume(value: Any) -> None:
            if not is_alive():
                process.close()
                return
            try:
                process.send(value)(resume)
            except StopIteration:
                return

        self.later(0.0, lambda: resume(None))

    def sleep(self, seconds: float) -> Wait:
        return lambda resume: self.later(seconds, lambda: resume(None))

    def _request(self, node: SimulatedNode, method: str, args: tuple[Any, ...]) -> Wait:
        """One try of a call; its answer, an error, or `Lost`."""

        def wait(resume: Callable[[Any], None]) -> None:
            waiting = [True]

            def settle(answer: Any) -> None:
                if waiting.pop() if waiting else False:
                    resume(answer)

            def reply(answer: Any) -> None:
                if not self._loses():
                    self.later(self.latency(), lambda: settle(answer))

            def arrive() -> None:
                self.note(node.name, method, *args[:2])
                try:
                    getattr(node, method)(*args, reply)
                except (StaleLease, InvalidRequest) as error:
                    reply(error)

            if node.is_up and not self._loses():
                node.later(self.latency(), arrive)
            self.later(TIMEOUT_S, lambda: settle(Lost()))

        return wait

    def _loses(self) -> bool:
        return not self.calm and self.rng.random() < LOSS

    def call(
        self, node: SimulatedNode, method: str, *args: Any, tries: int = 3
    ) -> Generator[Wait, Any, Any]:
        """With the same arguments, ids included, until it is answered. Raises what the node raised, or Lost."""
        answer: Any = Lost()
        for _ in range(tries):
            answer = yield self._request(node, method, args)
            if not isinstance(answer, Lost):
                break
        if isinstance(answer, Exception):
            raise answer
        return answer

    def one_sided(
        self, node: SimulatedNode, life: int, access: Callable[[], Any]
    ) -> Generator[Wait, Any, Any]:
        """Touches the memory of a node whose process has no part in it. Raises Lost when that life is over."""
        yield self.sleep(self.latency())
        if node.life != life or not node.is_up:
            raise Lost
        return access()

    # Clients

    def _client(self) -> Process:
        operations = {
            self._put: 50,
            self._get: 30,
            self._peek: 30,
            self._remove: 3,
            self._remove_everywhere: 4,
            self._copy: 4,
            self._hint: 6,
        }
        while not self.calm:
            yield self.sleep(self.rng.expovariate(200))
            [operation] = self.rng.choices(list(operations), list(operations.values()))
            self.num_operations += 1
            try:
                yield from operation(self.rng.choice(self.nodes))
            except (Lost, StaleLease) as error:
                self.outcomes[type(error).__name__] += 1

    def new_id(self) -> str:
        return f"id-{next(self._ids)}"

    def _chain(self) -> list[BlockKey]:
        """The head of one; some are asked for more than others."""
        chain = int(NUM_CHAINS * self.rng.random() ** 2)
        return [key_of(chain, depth) for depth in range(self.rng.randint(1, DEPTH))]

    def _put(self, node: SimulatedNode) -> Process:
        name, keys, life = self.new_id(), self._chain(), node.life
        granted = yield from self.call(node, "reserve", name, self._wishes(keys))
        contents = {}
        for key in granted:
            contents[key] = self._new_content(key)
            written = contents[key] if self.rng.random() < 0.99 else self._new_content(key)
            args = (name, key, written)
            if not (yield from self.one_sided(node, life, lambda a=args: node.write(*a))):  # type: ignore[misc]
                self.outcomes["window closed"] += 1
                return
        if not granted or self.rng.random() < 0.03:
            return  # it dies, and its reservation is left behind
        if self.rng.random() < 0.05:
            yield from self.call(node, "abort", name)
            return
        corrupt = yield from self.call(node, "commit", name, contents)
        self.outcomes["stored"] += len(granted) - len(corrupt)
        self.outcomes["arrived corrupt"] += len(corrupt)

    def _wishes(self, keys: list[BlockKey]) -> list[Wish]:
        tenant = self.rng.choice(["", "", "limited"])
        pin = Pin.SOFT if self.rng.random() < 0.1 else Pin.NONE
        return [
            Wish(
                key=key,
                parent=keys[depth - 1] if depth else None,
                length=self.rng.randint(0, 3 * ALIGNMENT),
                tenant=tenant,
                pin=pin,
            )
            for depth, key in enumerate(keys)
        ]

    def _new_content(self, key: BlockKey) -> int:
        """Tells its key, so that another key's bytes are found out."""
        return next(self._ids) << 16 | key[0] << 8 | key[1]

    def _take(self, node: SimulatedNode, key: BlockKey, content: int) -> None:
        """A reader believes that this is the value of `key`."""
        assert content & 0xFFFF == key[0] << 8 | key[1], "another key's value"
        assert content in node.committed, "a value that was never committed"

    def _get(self, node: SimulatedNode) -> Process:
        name, keys, asked_at = self.new_id(), self._chain(), self.now
        life, objects = yield from self.call(node, "lease", name, keys, LEASE_TTL_S)
        expires_at = asked_at + LEASE_TTL_S
        for stored in objects:
            if self.rng.random() < 0.1:
                renewed_at = self.now
                yield from self.call(node, "renew", name, LEASE_TTL_S)
                expires_at = renewed_at + LEASE_TTL_S
            content = yield from self._read(node, life, stored)
            if self.now < expires_at:
                assert content == stored.checksum, "changed under a lease"
                self._take(node, stored.key, content)
                self.outcomes["read under a lease"] += 1
            else:
                self.outcomes["read too late"] += 1
        self.outcomes["misses"] += len(keys) - len(objects)
        if self.rng.random() < 0.95:
            yield from self.call(node, "release", name)

    def _read(
        self, node: SimulatedNode, life: int, stored: StoredObject
    ) -> Generator[Wait, Any, int]:
        """In two halves; NOTHING when they do not belong together."""
        assert stored.offset is not None
        at, length = stored.offset, stored.length
        first = yield from self.one_sided(node, life, lambda: node.memory.read(at, min(length, 1)))
        whole: int = yield from self.one_sided(node, life, lambda: node.memory.read(at, length))
        return whole if first == whole else 0

    def _peek(self, node: SimulatedNode) -> Process:
        """Without a lease: the entry, the bytes, and the entry again."""
        key, life = self._chain()[-1], node.life
        view = (node.index.memory, node.index.geometry)
        before = yield from self.one_sided(node, life, lambda: node.look(view, key))
        if before is None or (entry := entry_of(before)).offset is None:
            self.outcomes["nothing to peek at"] += 1
            return
        stored = StoredObject(key, None, entry.length, entry.generation, offset=entry.offset)
        content = yield from self._read(node, life, stored)
        after = yield from self.one_sided(node, life, lambda: node.look(view, key))
        if after != before:
            self.outcomes["changed while peeking"] += 1
            return
        assert content == entry.checksum, "changed behind an unchanged entry"
        self._take(node, key, content)
        self.outcomes["peeked"] += 1
        yield from self.call(node, "touch", [key], tries=1)

    def _remove(self, node: SimulatedNode) -> Process:
        yield from self.call(node, "remove", self._chain()[-1:])

    def _remove_everywhere(self, _: SimulatedNode) -> Process:
        """At all nodes that can be reached."""
        keys, removal_id = self._chain()[-1:], next(self._ids)
        self.truth.begun_at[keys[0], removal_id] = self.now
        for node in self.nodes:
            try:
                yield from self.call(node, "remove_everywhere", keys, removal_id, tries=1)
            except Lost:
                self.outcomes["removed without hearing of it"] += 1

    def _hint(self, node: SimulatedNode) -> Process:
        keys = self._chain()
        if self.rng.random() < 0.7:
            yield from self.call(node, "prefetch", keys, tries=1)
        else:
            [pin] = self.rng.choices([Pin.NONE, Pin.SOFT, Pin.HARD], [8, 2, 1])
            yield from self.call(node, "pin", keys[:2], pin, tries=1)

    def _copy(self, target: SimulatedNode) -> Process:
        """A node fetches a chain from another one; it dies with the node."""
        source = self.rng.choice([node for node in self.nodes if node is not target])
        life = target.life
        if target.is_up:
            process = self._copying(target, source)
            self.spawn(process, lambda: target.life == life and target.is_up)
        yield self.sleep(0.0)

    def _copying(self, target: SimulatedNode, source: SimulatedNode) -> Process:
        lease_id, name, asked_at = self.new_id(), self.new_id(), self.now
        keys = self._chain()
        log = target.removals.log
        try:
            theirs = yield from self.call(source, "last_removals", keys)
            ours = [log.last(key) for key in keys]
            target.removals.learn([heard for heard in theirs if heard is not None])
            known = [heard.removal_id if heard is not None else 0 for heard in theirs]
            if any(each not in (0, told) for each, told in zip(ours, known, strict=True)):
                self.outcomes["not copied since it was removed"] += 1
                return
            heard = {key: log.last(key) for key in keys}
            life, objects = yield from self.call(source, "lease", lease_id, keys, LEASE_TTL_S)
            wishes = [
                Wish(key=o.key, parent=o.parent, length=o.length, second_hand=True) for o in objects
            ]
            granted = target.reserve_copy(name, wishes)
        except (Lost, StaleLease):
            return
        good = {}
        try:
            for stored in (o for o in objects if o.key in granted):
                content = yield from self._read(source, life, stored)
                target.write(name, stored.key, content)
                if content == stored.checksum and self.now < asked_at + LEASE_TTL_S:
                    good[stored.key] = content
        except Lost:
            good.clear()
        good = {key: content for key, content in good.items() if log.last(key) == heard[key]}
        target.end_copy(name, good)
        self.outcomes["copied"] += len(good)

    # Disturbances

    def _disturb(self) -> None:
        if self.calm:
            return
        node, rng = self.rng.choice(self.nodes), self.rng
        [kind] = rng.choices(
            ["crash", "stall", "compact", "disk", "directory"], [20, 10, 40, 2, 10]
        )
        self.note(node.name, kind)
        self.outcomes[kind] += 1
        if kind == "crash" and node.is_up:
            node.crash()
            self.later(rng.uniform(0, 2), node.start)
        elif kind == "stall":
            node.stalled_until = self.now + rng.uniform(0, 2 * LEASE_TTL_S)
        elif kind == "compact" and node.is_up:
            node.relocate_some()
        elif kind == "disk" and node.is_up:
            node.lose_disk()
        elif kind == "directory":
            self.directory.crash()
        self.later(rng.expovariate(0.5), self._disturb)

    # Running it

    def run(self, num_operations: int) -> None:
        """Operations, then quiet. Raises AssertionError with the last events."""
        try:
            self.run_for(num_operations)
            self.calm = True
            end = self.now + SETTLE_S
            self._run_until(lambda: self.now >= end)
            self.check()
            self.directory.check()
            self.outcomes["removed everywhere"] += self.truth.check(self.nodes)
        except Exception as error:
            last = "\n".join(" ".join(map(str, what)) for what in self.trace)
            raise AssertionError(
                f"seed {self.seed} after {self.num_operations} operations: {error!r}\n{last}"
            ) from error

    def run_for(self, num_operations: int) -> None:
        end = self.num_operations + num_operations
        self._run_until(lambda: self.num_operations >= end)

    def _run_until(self, is_over: Callable[[], bool]) -> None:
        next_check = self.num_operations + CHECK_EVERY
        while not is_over():
            self.now, _, action = heapq.heappop(self._heap)
            action()
            if self.num_operations >= next_check:
                next_check += CHECK_EVERY
                self.check()

    def check(self) -> None:
        for node in self.nodes:
            if node.is_up:
                node.check()
