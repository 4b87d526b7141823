"""Finds the store nodes that a command applies to, and makes calls to them.

Every unary call has a deadline, so a stopped node costs seconds. A node that does not answer is reported in addition to
the answers of the others, never instead of them.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from moonserve.deploy.terminal import EXIT_OK, EXIT_UNREACHABLE, Output
from moonserve.kvstore.wire import DIRECTORY_ROLE, STORE_ROLE
from moonserve.protocol.errors import ConfigError, InvalidRequest, MoonserveError, NoWorker, PeerLost
from moonserve.protocol.membership.registry import Member, Registry
from moonserve.protocol.pb import directory_pb2_grpc, kvstore_pb2, kvstore_pb2_grpc
from moonserve.protocol.process.tls import Certificates
from moonserve.protocol.request import Endpoint
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.protocol.rpc.wire import endpoint_from_wire

Reply = TypeVar("Reply")

CALL_TIMEOUT_S = 5.0
"""Every call takes milliseconds, but a busy machine may need longer."""
KEYS_PER_CALL = 2_000

Object = kvstore_pb2.StoreListReply.Object


class Unreachable(PeerLost):
    """A process could not be reached. The message names it and the reason in words for an operator."""

    def __init__(self, title: str, error: MoonserveError) -> None:
        super().__init__(f"{title}: {reason(error)}")


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A store node, or the directory. `stub`: its methods are named as in kvstore.proto and directory.proto; `title`:
    its name in messages."""

    endpoint: Endpoint
    stub: Any
    title: str

    @property
    def name(self) -> str:
        return self.endpoint.instance_id


@dataclass(slots=True)
class Replies(Generic[Reply]):
    """Replies and failures of several nodes for one call, in the order of the nodes."""

    replies: list[tuple[Node, Reply]] = field(default_factory=list)
    lost: list[tuple[Node, PeerLost]] = field(default_factory=list)


class StoreCluster:
    """Nodes of a KV store. `chosen`: ids or addresses to which the command is limited; empty = all in the registry."""

    def __init__(
        self,
        registry: Registry | None,
        chosen: Sequence[str],
        cluster_token: str,
        tls: Certificates | None = None,
    ) -> None:
        self.registry = registry
        self.token = cluster_token
        self.tls = tls
        self._chosen = chosen
        self._channels = Channels(cluster_token, tls)
        self._reached: set[Node] = set()

    @property
    def is_limited(self) -> bool:
        """True if the command is limited to chosen nodes."""
        return bool(self._chosen)

    async def close(self) -> None:
        await self._channels.close()
        if self.registry is not None:
            await self.registry.close()

    async def nodes(self) -> list[Node]:
        """Returns the nodes by id. Raises PeerLost, NoWorker if there is none, InvalidRequest if an id is unknown."""
        return await self.named(self._chosen) if self._chosen else await self.all_nodes()

    async def all_nodes(self) -> list[Node]:
        """Returns all nodes in the registry, or without one those chosen by address. Raises the errors of `nodes`."""
        if self.registry is None:
            return [await self._dial(name) for name in self._chosen if ":" in name]
        members = [m for m in await self._members() if m.role == STORE_ROLE]
        if not members:
            raise NoWorker("the registry knows no store node; start one with moonserve store --join")
        return [self._node(member.endpoint) for member in members]

    async def named(self, names: Iterable[str]) -> list[Node]:
        """Returns the nodes of these names, by id. A name with a colon is an address to dial; others are looked up."""
        wanted = dict.fromkeys(names)
        nodes = [await self._dial(name) for name in wanted if ":" in name]
        if ids := [name for name in wanted if ":" not in name]:
            known = {node.name: node for node in await self.all_nodes()}
            nodes += [_known(known, name) for name in ids]
        return sorted(nodes, key=lambda node: node.name)

    async def directory(self) -> Node | None:
        """Returns the directory, or None if the registry has none or there is no registry."""
        for member in await self._members():
            if member.role == DIRECTORY_ROLE:
                address = member.endpoint.rpc_address
                stub = directory_pb2_grpc.DirectoryStub(self._channels.to(address))
                return Node(member.endpoint, stub, f"the directory at {address}")
        return None

    async def call(
        self,
        peer: Node,
        method: Callable[..., Any],
        request: Any,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Any:
        """Calls a method of a node. Raises Unreachable, and the peer's errors."""
        try:
            return await self._channels.call(method, request, timeout_s=timeout_s)
        except PeerLost as error:
            raise Unreachable(peer.title, error) from error

    async def stats(self, nodes: Sequence[Node]) -> Replies[kvstore_pb2.StoreStatsReply]:
        """Returns the stats of each node. Raises the errors of `gathered`."""
        request = kvstore_pb2.StoreStatsRequest()
        return await gather_replies(nodes, lambda node: self.call(node, node.stub.Stats, request))

    async def stream(self, node: Node, method: Callable[..., Any], request: Any) -> AsyncGenerator[Any, None]:
        """Yields the messages of a stream. Raises Unreachable if the node is lost; keepalive detects a silent node."""
        await self._reach(node)
        try:
            messages: AsyncGenerator[Any, None] = self._channels.stream(method, request)  # type: ignore[assignment]
            async with aclosing(messages):
                async for message in messages:
                    yield message
        except PeerLost as error:
            raise Unreachable(node.title, error) from error

    async def _reach(self, node: Node) -> None:
        """Makes a call before the node's first stream, because gRPC itself waits 20 s for a stopped process."""
        if node not in self._reached:
            await self.call(node, node.stub.Describe, kvstore_pb2.StoreDescribeRequest())
            self._reached.add(node)

    async def objects(self, node: Node, key: bytes = b"") -> AsyncGenerator[Object, None]:
        """Yields the objects that a node holds; with a key, only that object."""
        request = kvstore_pb2.StoreListRequest(key=key)
        async with aclosing(self.stream(node, node.stub.List, request)) as replies:
            async for reply in replies:
                for found in reply.objects:
                    yield found

    async def _members(self) -> list[Member]:
        if self.registry is None:
            return []
        try:
            return await self.registry.members()
        except PeerLost as error:
            raise Unreachable("the registry", error) from error

    async def _dial(self, address: str) -> Node:
        unknown = {"instance_id": "", "transfer_address": "", "host": ""}
        node = self._node(Endpoint(epoch=0, rpc_address=address, **unknown))
        reply = await self.call(node, node.stub.Describe, kvstore_pb2.StoreDescribeRequest())
        return self._node(replace(endpoint_from_wire(reply.endpoint), rpc_address=address))

    def _node(self, endpoint: Endpoint) -> Node:
        stub = kvstore_pb2_grpc.KvStoreStub(self._channels.to(endpoint.rpc_address))
        title = f"{endpoint.instance_id} at {endpoint.rpc_address}".removeprefix(" at ")
        return Node(endpoint, stub, title)


async def gather_replies(nodes: Sequence[Node], ask: Callable[[Node], Any]) -> Replies[Any]:
    """Awaits `ask(node)` for all nodes at once. Raises any error but PeerLost, for example for a wrong token."""
    replies = await asyncio.gather(*map(ask, nodes), return_exceptions=True)
    answers: Replies[Any] = Replies()
    for node, reply in zip(nodes, replies, strict=True):
        if isinstance(reply, PeerLost):
            answers.lost.append((node, reply))
        elif isinstance(reply, BaseException):
            raise reply
        else:
            answers.replies.append((node, reply))
    return answers


def report_lost(answers: Replies[Any], output: Output) -> int:
    """Prints one line for each node that did not answer. Returns the exit code: EXIT_OK if all answered."""
    for _, error in answers.lost:
        output.problem(error.message)
    return EXIT_UNREACHABLE if answers.lost else EXIT_OK


def reason(error: MoonserveError) -> str:
    """Returns a short reason for a lost peer. gRPC's messages are long and repeat the address."""
    text = error.message
    if "refused" in text:
        return "connection refused; is it running?"
    if text.startswith("deadline_exceeded") or "timed out" in text or "ping timeout" in text:
        return "no answer in time"
    if "Socket closed" in text or "reset by peer" in text:
        return "the connection broke; has it ended?"
    if text.startswith("unimplemented"):
        return "answers, but does not know this call: another kind of process, or another version"
    return text.splitlines()[0]


def _known(known: dict[str, Node], name: str) -> Node:
    if name not in known:
        there = ", ".join(known) or "none; name it as HOST:PORT or give --registry"
        raise InvalidRequest(f"no store node is called {name!r}; known: {there}")
    return known[name]


def require_target(registry: str | None, chosen: Sequence[str]) -> None:
    """Raises ConfigError if neither a registry nor a node's address is given."""
    if registry is None and not any(":" in name for name in chosen):
        raise ConfigError("no cluster is named: give --registry URL (or set MOONSERVE_REGISTRY), or --node HOST:PORT")
