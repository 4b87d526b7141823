"""Runs a pool of real store nodes that can be killed, stopped and restarted, and audits the objects that remain.

Nodes keep their ids, flags and folders over restarts. The pool uses the registry address that it is given.
"""

import contextlib
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moonserve.deploy.launcher.ports import free_port
from moonserve.kvstore.client import KvStore
from moonserve.kvstore.client.node_access.background import BackgroundLoop
from moonserve.kvstore.client.node_access.objects import Key, block_of
from moonserve.kvstore.client.placement import Placement
from moonserve.kvstore.state.allocator import padded
from moonserve.protocol.errors import PeerLost
from moonserve.protocol.kv_blocks import BlockKey, pack_keys
from moonserve.protocol.pb import directory_pb2, directory_pb2_grpc, kvstore_pb2, kvstore_pb2_grpc
from moonserve.protocol.process.child_process import NotReady
from moonserve.protocol.rpc.grpc_transport import Channels
from tests import processes
from tests.kvstore.client.pools import BOTH, running_registry, store_of
from tests.kvstore.faults.values import value_of
from tests.kvstore.node.nodes import TOKEN, Node
from tests.patience import PATIENCE_S, until
from tests.stopping import stopped

Stats = kvstore_pb2.StoreStatsReply
SHORT_RIGHTS = ("--reservation-ttl-s", "2", "--lease-ttl-s", "2")
"""Default TTLs of the nodes, for calls that set none. Clients set TTLs from their deadlines."""


@dataclass(slots=True)
class Pool:
    """A pool of nodes. `running` has the nodes by id, `disks` the folders of nodes with a disk."""

    registry: str
    folder: Path
    ssd: str = ""
    flags: tuple[str, ...] = ()
    disks: dict[str, Path] = field(default_factory=dict)
    running: dict[str, Node] = field(default_factory=dict)
    background: BackgroundLoop = field(default_factory=BackgroundLoop)
    channels: Channels = field(default_factory=lambda: Channels(TOKEN))

    def begin(self, node_id: str) -> processes.Starting:
        disk = self.disks.setdefault(node_id, self.folder / node_id)
        ssd = ("--ssd", f"{disk}:{self.ssd}") if self.ssd else ()
        named = ("--instance-id", node_id, "--join", self.registry)
        with (self.folder / f"{node_id}.log").open("ab") as said:
            return processes.start("store", *named, *ssd, *self.flags, token=TOKEN, stderr=said)

    def start(self, *node_ids: str) -> None:
        """Starts nodes and waits for them. Raises ChildProcessError with all logs if one ends instead."""
        starting = {node_id: self.begin(node_id) for node_id in node_ids}
        for node_id, node in starting.items():
            try:
                self.running[node_id] = Node(node.process, node.facts()["rpc"])
            except NotReady:
                node.process.wait()
                raise ChildProcessError(self.said()) from None

    def kill(self, node_id: str) -> None:
        """Kills a node with SIGKILL."""
        self.running.pop(node_id).kill()

    def stop(self, node_id: str) -> None:
        """Stops a node with SIGTERM: it copies objects that are only in memory to its disk."""
        self.running.pop(node_id).stop()

    def restart(self, node_id: str) -> None:
        """Kills a node if it runs, starts it with the same id and folder, and waits until its disk is recovered."""
        if node_id in self.running:
            self.kill(node_id)
        self.start(node_id)
        until(lambda: self.stats(node_id).recovered == 1)

    def frozen(self, node_id: str) -> contextlib.AbstractContextManager[None]:
        """Stops a node by SIGSTOP and continues it by SIGCONT when the context ends."""
        return stopped(self.running[node_id].process.pid)

    def store(self, transports: tuple[str, ...] = BOTH) -> KvStore:
        """Returns a client that knows exactly the running nodes, by their current addresses, none of them resting."""
        store = store_of(self.registry, transports)
        addresses = {node_id: node.rpc_address for node_id, node in self.running.items()}
        until(lambda: {node.node_id: node.address for node in store.nodes() if not node.resting} == addresses)
        return store

    def alone(self, node_id: str) -> KvStore:
        """Returns a client of one node, which ignores placement."""
        return store_of(f"node://{self.running[node_id].rpc_address}")

    # Placement and replicas

    def rank_of(self, name: Key) -> list[str]:
        """Returns the running nodes in the order of preference for `name`."""
        placement = Placement(dict.fromkeys(self.running, 1.0))
        return [placement.ids[place] for place in placement.ranked([block_of(name).head])[0]]

    def put_at(self, node_id: str, name: Key, value: bytes) -> None:
        """Stores a replica at the given node."""
        with self.alone(node_id) as store:
            store.put(name, value)

    def holders(self, name: Key) -> set[str]:
        """Returns the running nodes that have `name`."""
        key = block_of(name).key
        return {n for n in self.running if key in {o.key for o in self.objects(n)}}

    # Calls to the directory and to nodes

    def ask(self, node_id: str, method: str, request: Any = None, timeout_s: float = PATIENCE_S) -> Any:
        """Makes a unary call to a node. Raises the call's errors."""
        return self._call(lambda: self._method(node_id, method), request, timeout_s)

    def ask_directory(self, method: str, request: Any, address: str = "") -> Any:
        """Makes a unary call to the directory, which by default is the pool's registry."""
        stub = directory_pb2_grpc.DirectoryStub
        return self._call(lambda: getattr(stub(self.channels.to(address or self.registry)), method), request)

    def _call(self, method: Callable[[], Any], request: Any, timeout_s: float = PATIENCE_S) -> Any:
        async def call() -> Any:
            return await self.channels.call(method(), request, timeout_s=timeout_s)

        return self.background.run(call(), timeout_s + PATIENCE_S)

    def stream(self, node_id: str, method: str, request: Any) -> list[Any]:
        """Returns all replies of a streaming call to a node."""

        async def everything() -> list[Any]:
            return [each async for each in self.channels.stream(self._method(node_id, method), request)]

        return self.background.run(everything(), PATIENCE_S)

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
        """Returns the keys of objects that do not match their checksum; the node has dropped them."""
        replies = self.stream(node_id, "Verify", kvstore_pb2.StoreVerifyRequest())
        return [key for reply in replies for key in reply.corrupt]

    # Auditing

    def audit(
        self, names: Iterable[bytes], *, held: Collection[bytes] = (), gone: Collection[bytes] = ()
    ) -> set[bytes]:
        """Returns the names that are found. Asserts that their values are right, that all of `held` and none of `gone`
        are found, that nodes find no damaged object, and that `add_up` holds."""
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
        """Asserts that every lease and reservation ends, and that visible objects then account for all used memory."""
        for node_id in self.running:
            self.until_stats(node_id, lambda s: not s.leased_bytes and not s.reserved_bytes)
            stats, objects = self.stats(node_id), self.objects(node_id)
            assert stats.free_bytes + stats.held_bytes == stats.capacity_bytes, node_id
            assert stats.held_bytes == sum(padded(o.length) for o in objects if o.in_memory)
            assert stats.num_objects == len(objects), node_id
            assert stats.num_on_disk == sum(not o.in_memory for o in objects), node_id
            assert stats.disk_live_bytes <= stats.disk_limit_bytes, node_id

    def said(self) -> str:
        """Returns the logs of all lives of all nodes."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()}" for log in logs)

    @staticmethod
    def _is_right(store: KvStore, name: bytes) -> bool:
        value = store.get(name)
        assert value is None or value == value_of(name), f"wrong bytes for {name!r}"
        return value is not None


def held(pool: Pool, keys: Sequence[BlockKey], directory: str = "") -> list[set[str]]:
    """Returns for each key the nodes that hold it according to the directory."""
    reply = pool.ask_directory("Locate", directory_pb2.LocateRequest(keys=pack_keys(keys)), directory)
    names = [node.instance_id for node in reply.nodes]
    return [{names[n] for n in holders.nodes} for holders in reply.holders]


def known_nodes(pool: Pool) -> dict[str, directory_pb2.StoreNodeView]:
    """Returns the nodes that the directory knows, by id."""
    reply = pool.ask_directory("GetNodes", directory_pb2.GetNodesRequest())
    return {node.endpoint.instance_id: node for node in reply.nodes}


def until_in_step(pool: Pool) -> None:
    """Waits until the directory knows exactly the running nodes and all of their objects."""

    def is_in_step() -> bool:
        with contextlib.suppress(PeerLost):  # gRPC retries a refused port only after a second
            nodes = known_nodes(pool)
            return nodes.keys() == pool.running.keys() and all(node.in_step for node in nodes.values())
        return False

    until(is_in_step)


def until_on_disk(pool: Pool, node_id: str, names: Iterable[Key]) -> None:
    wanted = {block_of(name).key for name in names}
    until(lambda: wanted <= {o.key for o in pool.objects(node_id) if o.on_disk}, PATIENCE_S)


@contextlib.contextmanager
def running_pool(folder: Path, num_nodes: int, *flags: str, ssd: str = "", registry: str = "") -> Iterator[Pool]:
    """Runs a pool. `ssd` is the capacity of each node's disk. Without `registry` this process serves a registry."""
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


@contextlib.contextmanager
def running_directory(*flags: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a directory process. SIGTERM must end it with exit code 0, unless the test has ended it."""
    named = ("--instance-id", "directory-0", "--port", str(port), "--log-level", "error")
    with processes.running("directory", *named, *flags, token=TOKEN) as (process, _):
        yield process


@contextlib.contextmanager
def pool_with_directory(
    folder: Path, num_nodes: int, *flags: str, ssd: str = "", directory: Sequence[str] = ()
) -> Iterator[Pool]:
    """Runs a pool, and a directory that knows its nodes and serves their registry. `directory`: its flags."""
    port = free_port()
    with (
        running_directory(*directory, port=port),
        running_pool(folder, num_nodes, *flags, ssd=ssd, registry=f"127.0.0.1:{port}") as pool,
    ):
        until_in_step(pool)
        yield pool


def _end(pool: Pool) -> None:
    for node in pool.running.values():
        node.kill()
    pool.background.run(pool.channels.close(), PATIENCE_S)
    pool.background.close()
