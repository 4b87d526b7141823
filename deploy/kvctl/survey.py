"""What only a leaving node holds, as the other nodes themselves say, and where it can go.

The directory is not asked: it may lag behind, and an object that it wrongly believes to be elsewhere would be lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from deploy.kvctl import objects
from deploy.kvctl.batches import Resident
from deploy.kvctl.cluster import KEYS_PER_CALL, Cluster, Node, Object, tell_lost
from deploy.terminal.output import Output
from kvstore.client.placement import Placement
from protocol.errors import NoWorker, PeerLost
from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2

Stats = kvstore_pb2.StoreStatsReply


class Others:
    """The nodes that stay and take objects, with what they said of themselves."""

    def __init__(self, replies: Sequence[tuple[Node, Stats]]) -> None:
        self.nodes = {node.name: node for node, _ in replies}
        self._stats = {node.name: reply for node, reply in replies}
        self._placement = Placement(
            {n: max(1.0, float(s.capacity_bytes)) for n, s in self._stats.items()}
        )

    @classmethod
    async def of(cls, cluster: Cluster, leaving: Node, output: Output) -> Others:
        """Raises NoWorker when there is none."""
        nodes = [node for node in await cluster.all_nodes() if node.name != leaving.name]
        request = kvstore_pb2.StoreStatsRequest()
        answers = await cluster.ask(nodes, lambda node: node.stub.Stats, request)
        tell_lost(answers, output)
        taking = [(node, reply) for node, reply in answers.replies if not reply.draining]
        if not taking:
            raise NoWorker(f"no other node takes what {leaving.name} holds; see kvctl nodes")
        return cls(taking)

    @property
    def room(self) -> int:
        """Bytes for which nothing must be evicted."""
        stats = self._stats.values()
        return sum(s.free_bytes + max(0, s.disk_limit_bytes - s.disk_live_bytes) for s in stats)

    def home(self, head: BlockKey) -> str:
        """Where clients look first once the leaving node is gone."""
        return self._placement.ids[self._placement.ranked([head])[0][0]]

    def candidates(self, first: str) -> list[Node]:
        """`first`, then the others, those with most room first."""
        rest = sorted(
            (name for name in self.nodes if name != first),
            key=lambda name: (-self._stats[name].free_bytes, name),
        )
        return [self.nodes[name] for name in (first, *rest)]


@dataclass(frozen=True, slots=True)
class Survey:
    """`alone`: what only the leaving node has. `pinned`: what has a pin there, and replicas elsewhere. `parents_at`:
    where blocks are that lead to some of `alone`."""

    alone: Mapping[BlockKey, Resident]
    pinned: Sequence[Resident]
    parents_at: Mapping[BlockKey, str]

    @property
    def num_bytes(self) -> int:
        return sum(item.length for item in self.alone.values())


async def survey(cluster: Cluster, leaving: Node, others: Others) -> Survey:
    """Raises PeerLost when the leaving node, or all others, cannot be reached."""
    alone: dict[BlockKey, Resident] = {}
    pinned: list[Resident] = []
    async for part in _parts(cluster, leaving):
        held = await _first_holders(cluster, [item.key for item in part], others)
        alone |= {item.key: item for item in part if item.key not in held}
        pinned += [item for item in part if item.key in held and item.pin]
    outside = {r.parent for r in alone.values() if r.parent is not None and r.parent not in alone}
    return Survey(alone, pinned, await _first_holders(cluster, sorted(outside), others))


async def _parts(cluster: Cluster, leaving: Node) -> AsyncIterator[list[Resident]]:
    part: list[Resident] = []
    async for found in cluster.objects(leaving):
        part.append(_resident(found))
        if len(part) == KEYS_PER_CALL:
            yield part
            part = []
    yield part


async def _first_holders(
    cluster: Cluster, keys: Sequence[BlockKey], others: Others
) -> dict[BlockKey, str]:
    if not keys:
        return {}
    answers = await objects.holders(cluster, list(others.nodes.values()), keys)
    if not answers.replies:
        raise PeerLost("none of the other nodes answers")
    return {key: node.name for node, held in reversed(answers.replies) for key in held}


def _resident(found: Object) -> Resident:
    return Resident(
        BlockKey(found.key), objects.parent_of(found), found.length, found.pin, found.in_memory
    )
