"""A pool of real store nodes that are killed, stopped and started again, and the audit of what is left.

Nodes keep their ids, flags and folders over restarts. The registry is whatever address the pool is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kvstore.allocator import padded
from kvstore.client import KvStore
from kvstore.client.backstage import Backstage
from kvstore.client.keys import Key, block_of
from kvstore.client.placement import Placement
from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2, kvstore_pb2_grpc
from protocol.rpc import Channels
from protocol.status import NotReady
from tests import processes
from tests.kvstore.client.pools import BOTH, running_registry, store_of
from tests.kvstore.directory.cluster import Questions, asking
from tests.kvstore.faults.values import value_of
from tests.kvstore.nodes import TOKEN, Node
from tests.patience import PATIENCE_S, until
from tests.stopping import stopped

T = TypeVar("T")
Stats = kvstore_pb2.StoreStatsReply
SHORT_RIGHTS = ("--reservation-ttl-s", "2", "--lease-ttl-s", "2")
"""For callers that name none; clients name theirs by their deadlines."""


class Starting:
    """A node on its way: several start at once."""

    def __init__(self, flags: Iterable[str], output: Path) -> None:
        self.output = output
        with output.open("ab") as said:
            self._starting = processes.start("kvstore", *flags, token=TOKEN, stderr=said)
        self.process = self._starting.process

    def ready(self) -> Node:
        """Raises ChildProcessError, with what it said, when it ends instead."""
        try:
            return Node(self.process, self._starting.facts()["rpc"])
        except NotReady:
            self.process.wait()
            raise ChildProcessError(self.output.read_text()) from None


@dataclass(slots=True)
class Pool:
    """`running` by id. `disks`: where the nodes' folders are, if they have any."""

    registry: str
    folder: Path
    ssd: str = ""
    flags: tuple[str, ...] = ()
    disks: dict[str, Path] = field(default_factory=dict)
    running: dict[str, Node] = field(default_factory=dict)
    backstage: Backstage = field(default_factory=Backstage)
    channels: Channels = field(default_factory=lambda: Channels(TOKEN))

    def begin(self, node_id: str) -> Starting:
        disk = self.disks.setdefault(node_id, self.folder / node_id)
        ssd = ("--ssd", f"{disk}:{self.ssd}") if self.ssd else ()
        named = ("--instance-id", node_id, "--join", self.registry)
        return Starting([*named, *ssd, *self.flags], self.folder / f"{node_id}.log")

    def start(self, *node_ids: str) -> None:
        starting = {node_id: self.begin(node_id) for node_id in node_ids}
        for node_id, process in starting.items():
            self.running[node_id] = process.ready()

    def kill(self, node_id: str) -> None:
        """SIGKILL."""
        self.running.pop(node_id).kill()

    def stop(self, node_id: str) -> None:
        """SIGTERM: it writes to its disk what is only in memory."""
        self.running.pop(node_id).stop()

    def restart(self, node_id: str) -> None:
        """SIGKILL, and another life with the same id and folder; all of its disk is known again on return."""
        if node_id in self.running:
            self.kill(node_id)
        self.start(node_id)
        until(lambda: self.stats(node_id).recovered == 1)

    def frozen(self, node_id: str) -> contextlib.AbstractContextManager[None]:
        """SIGSTOP; SIGCONT."""
        return stopped(self.running[node_id].process.pid)

    def store(self, transports: tuple[str, ...] = BOTH) -> KvStore:
        """A client that knows the nodes that run, and no others."""
        store = store_of(self.registry, transports)
        until(lambda: self.is_known_to(store))
        return store

    def is_known_to(self, store: KvStore) -> bool:
        """Whether a client has the addresses of this life of each node, and all of them answer."""
        known = {node.node_id: node.address for node in store.nodes() if not node.resting}
        return known == {node_id: node.rpc_address for node_id, node in self.running.items()}

    def alone(self, node_id: str) -> KvStore:
        """A client of one node, whatever belongs where."""
        return store_of(f"node://{self.running[node_id].rpc_address}")

    # Which node has what

    def rank_of(self, name: Key) -> list[str]:
        """The nodes that run, in the order in which `name` is put."""
        placement = Placement(dict.fromkeys(self.running, 1.0))
        return [placement.ids[place] for place in placement.ranked([block_of(name).head])[0]]

    def put_at(self, node_id: str, name: Key, value: bytes) -> None:
        """A replica at a node of the caller's choice."""
        with self.alone(node_id) as store:
            store.put(name, value)

    def holders(self, name: Key) -> set[str]:
        """Those that run and have `name`."""
        key = block_of(name).key
        return {n for n in self.running if key in {o.key for o in self.objects(n)}}

    # Asking the directory, and nodes

    def directory(self, question: Callable[[Questions], Awaitable[T]]) -> T:
        """What the directory answers, which holds the registry."""

        async def ask() -> T:
            async with asking(int(self.registry.rpartition(":")[2])) as asks:
                return await question(asks)

        return self.backstage.ask(ask(), PATIENCE_S)

    def ask(self, node_id: str, method: str, request: Any = None, timeout_s: float = PATIENCE_S) -> Any:
        """A unary call of a node. Raises as it."""

        async def call() -> Any:
            return await self.channels.call(self._method(node_id, method), request, timeout_s=timeout_s)

        return self.backstage.ask(call(), timeout_s + PATIENCE_S)

    def stream(self, node_id: str, method: str, request: Any) -> list[Any]:
        """Everything that a streaming call of a node gives."""

        async def everything() -> list[Any]:
            return [each async for each in self.channels.stream(self._method(node_id, method), request)]

        return self.backstage.ask(everything(), PATIENCE_S)

    def _method(self, node_id: str, method: str) -> Any:
        channel = self.channels.to(self.running[node_id].rpc_address)
        return getattr(kvstore_pb2_grpc.KvStoreStub(channel), method)

    def stats(self, node_id: str) -> Stats:
        stats: Stats = self.ask(node_id, "Stats", kvstore_pb2.StoreStatsRequest())
        return stats

    def until_stats(self, node_id: str, holds: Callable[[Stats], object]) -> None:
        until(lambda: holds(self.stats(node_id)), PATIENCE_S)

    def objects(self, node_id: str) -> list[kvstore_pb2.StoreListReply.Object]:
        replies = self.stream(node_id, "List", kvstore_pb2.StoreListRequest())
        return [each for reply in replies for each in reply.objects]

    def verify(self, node_id: str) -> list[bytes]:
        """The keys of what does not match its checksum; the node has dropped them."""
        replies = self.stream(node_id, "Verify", kvstore_pb2.StoreVerifyRequest())
        return [key for reply in replies for key in reply.corrupt]

    # Auditing

    def audit(
        self, names: Iterable[bytes], *, held: Collection[bytes] = (), gone: Collection[bytes] = ()
    ) -> set[bytes]:
        """The names that are found. Every one of them is right, all that must be `held` are there, nothing that is
        `gone` is, nodes find nothing damaged, and their books add up."""
        with self.store() as store:
            found = {name for name in names if self._is_right(store, name)}
            lost = [name for name in held if not self._is_right(store, name)]
            back = [name for name in gone if store.get(name) is not None]
        said = self.said()
        assert not lost, f"{len(lost)} of {len(held)} that must be held are lost: {lost[:3]}\n{said}"
        assert not back, f"{len(back)} of {len(gone)} that were removed are back: {back[:3]}\n{said}"
        assert not any(self.verify(node_id) for node_id in self.running)
        self.add_up()
        return found

    def add_up(self) -> None:
        """Every right ends, and then all memory is free or taken by something that is visible."""
        for node_id in self.running:
            self.until_stats(node_id, lambda s: not s.leased_bytes and not s.reserved_bytes)
            stats, objects = self.stats(node_id), self.objects(node_id)
            assert stats.free_bytes + stats.held_bytes == stats.capacity_bytes, node_id
            assert stats.held_bytes == sum(padded(o.length) for o in objects if o.in_memory)
            assert stats.num_objects == len(objects), node_id
            assert stats.num_on_disk == sum(not o.in_memory for o in objects), node_id
            assert stats.disk_live_bytes <= stats.disk_limit_bytes, node_id

    def said(self) -> str:
        """By all lives of all nodes, for whoever has to find out why."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()}" for log in logs)

    @staticmethod
    def _is_right(store: KvStore, name: bytes) -> bool:
        value = store.get(name)
        assert value is None or value == value_of(name), f"wrong bytes for {name!r}"
        return value is not None


def held(pool: Pool, keys: Sequence[BlockKey]) -> list[set[str]]:
    """Of each key, the nodes that the directory names."""
    return pool.directory(lambda asks: asks.holders(keys))


def until_on_disk(pool: Pool, node_id: str, names: Iterable[Key]) -> None:
    wanted = {block_of(name).key for name in names}
    until(lambda: wanted <= {o.key for o in pool.objects(node_id) if o.on_disk}, PATIENCE_S)


@contextlib.contextmanager
def running_pool(folder: Path, num_nodes: int, *flags: str, ssd: str = "", registry: str = "") -> Iterator[Pool]:
    """`ssd` is the capacity of each node's disk. Without a registry's address this process serves one."""
    with contextlib.ExitStack() as stack:
        registry = registry or stack.enter_context(running_registry())
        pool = Pool(registry, folder, ssd, (*SHORT_RIGHTS, *flags))
        stack.callback(_end, pool)
        pool.start(*(f"store-{number}" for number in range(num_nodes)))
        yield pool
        for node in pool.running.values():
            node.process.terminate()
        for node in pool.running.values():
            assert node.process.wait(timeout=PATIENCE_S) == 0


def _end(pool: Pool) -> None:
    for node in pool.running.values():
        node.kill()
    pool.backstage.ask(pool.channels.close(), PATIENCE_S)
    pool.backstage.close()
