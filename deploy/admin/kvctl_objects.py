"""Objects of the store for all verbs: keys on the command line, replicas, ancestors and descendants of a block."""

import re
from argparse import ArgumentParser, Namespace, _SubParsersAction
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from moonserve.deploy.admin.kvctl_cluster import KEYS_PER_CALL, Node, Object, Replies, StoreCluster, gather_replies
from moonserve.deploy.terminal import SHORT_KEY_DIGITS, Output, Table, size
from moonserve.kvstore.client.node_access.objects import plain_key
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey
from moonserve.protocol.pb import kvstore_pb2

PINS = {
    kvstore_pb2.STORE_PIN_NONE: "none",
    kvstore_pb2.STORE_PIN_SOFT: "soft",
    kvstore_pb2.STORE_PIN_HARD: "hard",
}


@dataclass(frozen=True, slots=True)
class Replica:
    """One node's copy of an object."""

    node: Node
    object: Object

    @property
    def parent(self) -> BlockKey | None:
        """Key of the block before it; None = the chain starts here."""
        return parent_of(self.object)


def parent_of(found: Object) -> BlockKey | None:
    return BlockKey(found.parent) if found.parent and found.parent != NO_PARENT else None


def tier(found: Object) -> str:
    tiers = [name for name, there in (("memory", found.in_memory), ("disk", found.on_disk)) if there]
    return "+".join(tiers)


def as_json(node: Node, found: Object) -> dict[str, Any]:
    """Returns a JSON record. Checksums are hex, because programs read large JSON numbers as floats."""
    parent = parent_of(found)
    return {
        "key": found.key.hex(),
        "node": node.name,
        "in_memory": found.in_memory,
        "on_disk": found.on_disk,
        "bytes": found.length,
        "pin": PINS[found.pin],
        "tenant": found.tenant,
        "holds": found.holds,
        "followers": found.followers,
        "parent": parent.hex() if parent else None,
        "checksum": f"{found.checksum:016x}",
        "generation": f"{found.generation:x}",
    }


_CELLS: dict[str, Callable[[Replica], str]] = {
    "node": lambda replica: replica.node.name,
    "tier": lambda replica: tier(replica.object),
    ">size": lambda replica: size(replica.object.length),
    ">bytes": lambda replica: f"{replica.object.length:,}",
    "checksum": lambda replica: f"{replica.object.checksum:016x}",
    "generation": lambda replica: f"{replica.object.generation:x}",
    "pin": lambda replica: PINS[replica.object.pin],
    ">holds": lambda replica: str(replica.object.holds),
    ">followers": lambda replica: str(replica.object.followers),
    "tenant": lambda replica: replica.object.tenant,
}


def cells(replica: Replica, columns: Iterable[str], output: Output) -> list[str]:
    """Returns the cells of a table's row."""
    return [output.key(replica.object.key) if column == "key" else _CELLS[column](replica) for column in columns]


def show_replicas(found: Sequence[Replica], output: Output) -> None:
    columns = ("node", "tier", ">bytes", "checksum", "generation", "pin", ">holds", ">followers")
    table = Table(output, *columns)
    for replica in found:
        table.add(*cells(replica, columns, output))
    table.flush()


async def replicas(cluster: StoreCluster, nodes: Sequence[Node], key: BlockKey) -> Replies[list[Object]]:
    """Returns for each node a list of its object with this key, or an empty list."""

    async def one(node: Node) -> list[Object]:
        return [found async for found in cluster.objects(node, key)]

    return await gather_replies(nodes, one)


def present(answers: Replies[list[Object]]) -> list[Replica]:
    return [Replica(node, found) for node, objects in answers.replies for found in objects]


async def ancestors(
    cluster: StoreCluster, nodes: Sequence[Node], first: Sequence[Replica]
) -> AsyncIterator[tuple[BlockKey, list[Replica]]]:
    """Yields a block's ancestors with their replicas, nearest first. If the chain is broken, the last has none."""
    seen: set[BlockKey] = set()
    parent = first[0].parent
    while parent is not None and parent not in seen:
        seen.add(parent)
        found = present(await replicas(cluster, nodes, parent))
        yield parent, found
        parent = found[0].parent if found else None


async def chain_of(cluster: StoreCluster, nodes: Sequence[Node], key: BlockKey) -> list[BlockKey]:
    """Returns the key and its resident ancestors, head first; empty if no node has the key."""
    answers = await replicas(cluster, nodes, key)
    found = present(answers)
    if not found:
        return []
    answering = [node for node, _ in answers.replies]
    above = [k async for k, there in ancestors(cluster, answering, found) if there]
    return [*reversed(above), key]


async def descendants(cluster: StoreCluster, nodes: Sequence[Node], keys: Iterable[BlockKey]) -> list[BlockKey]:
    """Returns the keys and their resident descendants, children before parents. Lists each node's objects once."""
    children: dict[BlockKey, set[BlockKey]] = {}
    for node in nodes:
        async for found in cluster.objects(node):
            parent = parent_of(found)
            if parent is not None:
                children.setdefault(parent, set()).add(BlockKey(found.key))
    generations = list(_generations(children, dict.fromkeys(keys)))
    return [key for generation in reversed(generations) for key in generation]


def _generations(children: dict[BlockKey, set[BlockKey]], keys: Collection[BlockKey]) -> Iterator[list[BlockKey]]:
    seen: set[BlockKey] = set()
    while keys:
        yield sorted(keys)
        seen.update(keys)
        keys = {child for key in keys for child in children.get(key, ())} - seen


async def holders(cluster: StoreCluster, nodes: Sequence[Node], keys: Sequence[BlockKey]) -> Replies[list[BlockKey]]:
    """Returns for each node the keys that it has."""

    async def one(node: Node) -> list[BlockKey]:
        found: list[BlockKey] = []
        for piece in pieces(keys):
            request = kvstore_pb2.StoreExistsRequest(keys=piece)
            reply = await cluster.call(node, node.stub.Exists, request)
            found += [key for key, there in zip(piece, reply.present, strict=True) if there]
        return found

    return await gather_replies(nodes, one)


def pieces(keys: Sequence[BlockKey]) -> Iterator[Sequence[BlockKey]]:
    """Splits keys into portions for one call each."""
    return (keys[start : start + KEYS_PER_CALL] for start in range(0, len(keys), KEYS_PER_CALL))


HELP = "32 hex digits are a block key; anything else is a plain key, found under its digest"
_BLOCK_KEY = re.compile(r"[0-9a-fA-F]{32}")
_CUT_KEY = re.compile(rf"[0-9a-f]{{{SHORT_KEY_DIGITS}}}")


def add_key(parser: ArgumentParser, *, several: bool = False) -> None:
    parser.add_argument("keys" if several else "key", metavar="KEY", help=HELP, nargs="+" if several else None)
    parser.add_argument("--plain", action="store_true", help="KEY is a plain key even if it looks like a block key")


def parse(text: str, *, plain: bool) -> BlockKey:
    """Returns the block key of a key from the command line. Raises InvalidRequest if a plain key is too long."""
    if not plain and _BLOCK_KEY.fullmatch(text):
        return BlockKey(bytes.fromhex(text))
    return plain_key(text.encode(errors="surrogateescape"))


def texts_by_key(texts: Iterable[str], arguments: Namespace) -> dict[BlockKey, str]:
    """Returns each key once, with its text from the command line."""
    return {parse(text, plain=arguments.plain): text for text in texts}


def no_such_key(text: str) -> str:
    if _CUT_KEY.fullmatch(text):
        return f"no such key: {text} (a shortened key? --long shows all 32 digits)"
    return f"no such key: {text}"


Run: TypeAlias = Callable[[Namespace, StoreCluster, Output], Awaitable[int]]
Verbs: TypeAlias = "_SubParsersAction[ArgumentParser]"  # argparse has no public name for it


def add(verbs: Verbs, name: str, run: Run, common: ArgumentParser, help: str) -> ArgumentParser:
    """Adds a verb and returns its parser, so that its own arguments can be added."""
    parser = verbs.add_parser(name, parents=[common], help=help, description=help)
    parser.set_defaults(run=run, asks_stores=True)
    return parser
