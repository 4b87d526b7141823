"""`kvctl drop`: removes objects from every node. A reader that has a lease may finish."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence

from deploy.kvctl import keys, objects, verb
from deploy.kvctl.cluster import Answers, Cluster, Node, gathered, tell_lost
from deploy.terminal.endings import EXIT_NOT_FOUND, EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE
from deploy.terminal.output import Output, count
from kvstore.client.pool import new_removal_id
from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2

UNASKED = 10
"""More objects than this need --yes: the slip of a glob or of a chain's head."""


def add_to(verbs: verb.Verbs, common: ArgumentParser) -> None:
    parser = verb.add(verbs, "drop", run, common, "remove objects from every node")
    keys.add_to(parser, several=True)
    parser.add_argument(
        "--chain-below",
        action="store_true",
        help="and all blocks that follow them; lists every node",
    )
    parser.add_argument(
        "--yes", action="store_true", help=f"needed for more than {UNASKED} objects"
    )


async def run(arguments: Namespace, cluster: Cluster, output: Output) -> int:
    texts = keys.texts_by_key(arguments.keys, arguments)
    nodes = await cluster.nodes()
    wanted = list(texts)
    if arguments.chain_below:
        wanted = await objects.below(cluster, nodes, wanted)
    answers = await objects.holders(cluster, nodes, wanted)
    found = {key for _, held in answers.replies for key in held}
    if len(found) > UNASKED and not arguments.yes:
        output.problem(f"this would drop {count(len(found), 'object')}; add --yes if it is meant")
        return EXIT_USAGE
    return await _drop(cluster, wanted, texts, answers, output)


async def _drop(
    cluster: Cluster,
    wanted: Sequence[BlockKey],
    texts: Mapping[BlockKey, str],
    answers: Answers[list[BlockKey]],
    output: Output,
) -> int:
    """Every node is told, also those that hold nothing: they tell those that cannot be reached now. With --node it is
    a matter of the nodes that were named."""
    removal_id = 0 if cluster.is_limited else new_removal_id()
    reached = [node for node, _ in answers.replies]
    dropped = await gathered(reached, lambda node: _remove(cluster, node, wanted, removal_id))
    answers.lost += dropped.lost
    removed = [number for _, number in dropped.replies if number]
    found = {key for _, held in answers.replies for key in held}
    output.record(objects=len(found), replicas=sum(removed), nodes=len(removed))
    if found:
        where = f"{count(sum(removed), 'replica')} on {count(len(removed), 'node')}"
        output.line(f"dropped {count(len(found), 'object')}: {where}")
    missing = [text for key, text in texts.items() if key not in found]
    for text in missing:
        output.problem(keys.no_such_key(text))
    tell_lost(answers, output)
    if answers.lost:
        output.problem(
            "nodes that were not reached may still hold them; they hear of it when they are back"
        )
        return EXIT_UNREACHABLE
    return EXIT_NOT_FOUND if missing else EXIT_OK


async def _remove(cluster: Cluster, node: Node, wanted: Sequence[BlockKey], removal_id: int) -> int:
    """In the order given, so that no block is there without what leads to it."""
    removed = 0
    for piece in objects.pieces(wanted):
        request = kvstore_pb2.StoreRemoveRequest(keys=piece, removal_id=removal_id)
        removed += (await cluster.call(node, node.stub.Remove, request)).removed
    return removed
