"""Finds the objects that only the drained node holds, and plans the order and targets of their copies.

Objects in memory are first, because reading others from disk may evict them; then parents precede children. A chain is
copied to the node of its preceding blocks, or else to its home as computed by clients (`kvstore.client.placement`), so
that they find it at once. Each call is bounded in objects and bytes.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moonserve.deploy.admin import kvctl_objects
from moonserve.deploy.admin.kvctl_cluster import KEYS_PER_CALL, Node, StoreCluster, report_lost
from moonserve.deploy.terminal import Output
from moonserve.kvstore.client.placement import Placement
from moonserve.protocol.errors import NoWorker, PeerLost
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.pb import kvstore_pb2

MAX_KEYS = 64
MAX_BYTES = 64 * 2**20
"""Limit of one call, which takes a fraction of a second. A larger object is copied alone."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of the leaving node. `pin` is a StorePin."""

    key: BlockKey
    parent: BlockKey | None
    length: int
    pin: int = 0
    in_memory: bool = True


@dataclass(frozen=True, slots=True)
class Batch:
    """Objects for one call to the node `target`, in order."""

    target: str
    objects: tuple[StoredObject, ...]

    @property
    def num_bytes(self) -> int:
        return sum(item.length for item in self.objects)


def batches(
    objects: Mapping[BlockKey, StoredObject], target_of: Callable[[StoredObject], str]
) -> dict[str, list[Batch]]:
    """Returns batches by target, in the order of copying. `target_of` is called for the first object of each chain."""
    places = _places(objects)
    firsts = {first.key: first for first, _ in places.values()}
    targets = {key: target_of(first) for key, first in firsts.items()}
    by_target: dict[str, list[StoredObject]] = {}
    for item in sorted(objects.values(), key=lambda i: (not i.in_memory, places[i.key][1], i.key)):
        by_target.setdefault(targets[places[item.key][0].key], []).append(item)
    return {target: list(_cut(target, items)) for target, items in by_target.items()}


def _places(objects: Mapping[BlockKey, StoredObject]) -> dict[BlockKey, tuple[StoredObject, int]]:
    """Returns for each object its first ancestor within `objects`, or itself, and the distance to it."""
    places: dict[BlockKey, tuple[StoredObject, int]] = {}
    for item in objects.values():
        path: list[StoredObject] = []
        while item.key not in places:  # this also ends a cycle
            places[item.key] = item, 0
            if item.parent is None or item.parent not in objects:
                break
            path.append(item)
            item = objects[item.parent]
        first, depth = places[item.key]
        for each in reversed(path):
            depth += 1
            places[each.key] = first, depth
    return places


def _cut(target: str, objects: Sequence[StoredObject]) -> Iterator[Batch]:
    part: list[StoredObject] = []
    num_bytes = 0
    for item in objects:
        if part and (len(part) == MAX_KEYS or num_bytes + item.length > MAX_BYTES):
            yield Batch(target, tuple(part))
            part, num_bytes = [], 0
        part.append(item)
        num_bytes += item.length
    if part:
        yield Batch(target, tuple(part))


Stats = kvstore_pb2.StoreStatsReply


class TargetNodes:
    """Other nodes that accept objects, with their stats."""

    def __init__(self, replies: Sequence[tuple[Node, Stats]]) -> None:
        self.nodes = {node.name: node for node, _ in replies}
        self._stats = {node.name: reply for node, reply in replies}
        self._placement = Placement({n: max(1.0, float(s.capacity_bytes)) for n, s in self._stats.items()})

    @classmethod
    async def of(cls, cluster: StoreCluster, leaving: Node, output: Output) -> "TargetNodes":
        """Requests the stats of the other nodes. Raises NoWorker if none accepts objects."""
        nodes = [node for node in await cluster.all_nodes() if node.name != leaving.name]
        answers = await cluster.stats(nodes)
        report_lost(answers, output)
        taking = [(node, reply) for node, reply in answers.replies if not reply.draining]
        if not taking:
            raise NoWorker(f"no other node accepts the objects of {leaving.name}; see kvctl nodes")
        return cls(taking)

    @property
    def room(self) -> int:
        """Bytes in memory and on disks that can be stored without eviction."""
        stats = self._stats.values()
        return sum(s.free_bytes + max(0, s.disk_limit_bytes - s.disk_live_bytes) for s in stats)

    def home(self, head: BlockKey) -> str:
        """Returns the node where clients look first for this chain once the leaving node is gone."""
        return self._placement.ids[self._placement.ranked([head])[0][0]]

    def candidates(self, first: str) -> list[Node]:
        """Returns the node `first`, then the others in descending order of free memory."""
        rest = sorted(
            (name for name in self.nodes if name != first),
            key=lambda name: (-self._stats[name].free_bytes, name),
        )
        return [self.nodes[name] for name in (first, *rest)]


@dataclass(frozen=True, slots=True)
class Survey:
    """Objects of the leaving node. `alone`: those that no other node has; `pinned`: those with a pin and with replicas
    on other nodes; `parents_at`: nodes of parents that are not in `alone`."""

    alone: Mapping[BlockKey, StoredObject]
    pinned: Sequence[StoredObject]
    parents_at: Mapping[BlockKey, str]

    @property
    def num_bytes(self) -> int:
        return sum(item.length for item in self.alone.values())


async def survey(cluster: StoreCluster, leaving: Node, others: TargetNodes) -> Survey:
    """Compares the leaving node with the others. Raises PeerLost if it, or all others, cannot be reached."""
    alone: dict[BlockKey, StoredObject] = {}
    pinned: list[StoredObject] = []
    async for part in _parts(cluster, leaving):
        held = await _first_holders(cluster, [item.key for item in part], others)
        alone |= {item.key: item for item in part if item.key not in held}
        pinned += [item for item in part if item.key in held and item.pin]
    outside = {r.parent for r in alone.values() if r.parent is not None and r.parent not in alone}
    return Survey(alone, pinned, await _first_holders(cluster, sorted(outside), others))


async def _parts(cluster: StoreCluster, leaving: Node) -> AsyncIterator[list[StoredObject]]:
    part: list[StoredObject] = []
    async for found in cluster.objects(leaving):
        key, parent = BlockKey(found.key), kvctl_objects.parent_of(found)
        part.append(StoredObject(key, parent, found.length, found.pin, found.in_memory))
        if len(part) == KEYS_PER_CALL:
            yield part
            part = []
    yield part


async def _first_holders(cluster: StoreCluster, keys: Sequence[BlockKey], others: TargetNodes) -> dict[BlockKey, str]:
    if not keys:
        return {}
    answers = await kvctl_objects.holders(cluster, list(others.nodes.values()), keys)
    if not answers.replies:
        raise PeerLost("no other node answers")
    return {key: node.name for node, held in reversed(answers.replies) for key in held}
