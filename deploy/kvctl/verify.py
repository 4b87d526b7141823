"""`kvctl verify`: every object of every node compared with its checksum; what does not match is dropped there."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from deploy.kvctl import objects, verb
from deploy.kvctl.cluster import Answers, Cluster, Node, gathered, tell_lost
from deploy.terminal.endings import EXIT_NOT_FOUND, EXIT_OK, EXIT_UNREACHABLE
from deploy.terminal.output import Output, count
from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2
from protocol.progress import Progress


def add_to(verbs: verb.Verbs, common: ArgumentParser) -> None:
    help = "compare every object with its checksum, in memory and on disk; drop what is corrupt"
    verb.add(verbs, "verify", run, common, help)


async def run(arguments: Namespace, cluster: Cluster, output: Output) -> int:
    nodes = await cluster.nodes()
    passes = {node: _Pass(node) for node in nodes}
    with output.progress() as progress:
        answers = await gathered(nodes, lambda node: passes[node].run(cluster, progress))
    # Also of a node that was lost on the way: what it found was dropped.
    corrupt = [key for done in passes.values() for key in done.corrupt]
    others = await objects.holders(cluster, await cluster.all_nodes(), corrupt)
    lost = {node for node, _ in answers.lost}
    for node, done in passes.items():
        done.tell(others, output, is_lost=node in lost)
    tell_lost(answers, output)
    if answers.lost:
        return EXIT_UNREACHABLE
    return EXIT_NOT_FOUND if corrupt else EXIT_OK


class _Pass:
    """Over one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._checked = self._total = 0
        self.corrupt: list[BlockKey] = []

    async def run(self, cluster: Cluster, progress: Progress) -> None:
        request = kvstore_pb2.StoreVerifyRequest()
        async for found in cluster.stream(self._node, self._node.stub.Verify, request):
            self._checked, self._total = found.checked, found.total
            self.corrupt += [BlockKey(key) for key in found.corrupt]
            text = f"{found.checked:,} of {count(found.total, 'object')}"
            progress.show(self._node.name, found.checked, found.total, text)

    def tell(self, others: Answers[list[BlockKey]], output: Output, *, is_lost: bool) -> None:
        """`others`: who still has what was corrupt here."""
        name = self._node.name
        output.record(
            node=name,
            checked=self._checked,
            total=self._total,
            corrupt=[key.hex() for key in self.corrupt],
        )
        for key in self.corrupt:
            left = ", ".join(node.name for node, held in others.replies if key in held)
            fate = f"still on {left}" if left else "it was the only replica"
            output.line(f"{name}: corrupt {key.hex()}, dropped; {fate}")
        what = f"{len(self.corrupt):,} corrupt" if self.corrupt else "all good"
        until = " before it was lost" if is_lost else ""
        if self._checked or not is_lost:
            output.line(f"{name}: {count(self._checked, 'object')} checked{until}, {what}")
