"""`kvctl replicas`: where the replicas of an object are, and how many there shall be."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from deploy.kvctl import keys, objects, verb
from deploy.kvctl.cluster import Cluster, tell_lost
from deploy.kvctl.objects import Replica
from deploy.terminal.amounts import size
from deploy.terminal.endings import EXIT_NOT_FOUND, EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE
from deploy.terminal.output import Output, Table, count
from protocol.keys import BlockKey
from protocol.pb import directory_pb2

Change = directory_pb2.ChangeReplicaReply
# The chain comes along, and each call copies for at most 30 s.
CHANGE_TIMEOUT_S = 120.0


def add_to(verbs: verb.Verbs, common: ArgumentParser) -> None:
    parser = verb.add(
        verbs, "replicas", run, common, "show an object's replicas; with N, make it so many"
    )
    keys.add_to(parser)
    parser.add_argument(
        "num_replicas",
        metavar="N",
        type=int,
        nargs="?",
        help="replicas from now on; what leads to the object gains them too",
    )


async def run(arguments: Namespace, cluster: Cluster, output: Output) -> int:
    key, wanted = keys.parse(arguments.key, plain=arguments.plain), arguments.num_replicas
    if wanted is not None and wanted < 1:
        output.problem("N must be at least 1; `kvctl drop` removes an object")
        return EXIT_USAGE
    nodes = await cluster.nodes()
    changed = await _change(cluster, key, wanted, output) if wanted is not None else None
    if wanted is not None and changed is None:
        return EXIT_USAGE
    answers = await objects.replicas(cluster, nodes, key)
    found = objects.present(answers)
    tell_lost(answers, output)
    _show(found, output)
    if answers.lost:
        return EXIT_UNREACHABLE
    if not found:
        output.problem(keys.no_such_key(arguments.key))
    elif wanted is not None and len(found) != wanted:
        output.problem(_why(wanted, len(found), changed))
    return EXIT_OK if found and wanted in (None, len(found)) else EXIT_NOT_FOUND


async def _change(cluster: Cluster, key: BlockKey, wanted: int, output: Output) -> Change | None:
    """None = there is nobody who could."""
    directory = await cluster.directory()
    if directory is None:
        output.problem(
            "replicas are changed by the directory, and the registry knows none; start moonserve directory"
        )
        return None
    request = directory_pb2.ChangeReplicaRequest(keys=key, num_replicas=wanted)
    reply: Change = await cluster.call(
        directory, directory.stub.ChangeReplica, request, timeout_s=CHANGE_TIMEOUT_S
    )
    if reply.created or reply.dropped:
        output.note(
            f"created {count(reply.created, 'replica')}, dropped {reply.dropped:,} (its chain's included)"
        )
    return reply


def _why(wanted: int, there: int, changed: Change | None) -> str:
    if changed is not None and changed.missing:
        return "the directory has not heard of this object yet; run it again in a second"
    if changed is not None and changed.failed:
        failed = count(changed.failed, "replica")
        return f"{failed} could not be made; run it again, another node is tried then"
    fewer = "no other node takes replicas now; see kvctl nodes"
    more = "a block that others follow keeps its replicas"
    return f"{wanted} wanted, {there} there: {fewer if there < wanted else more}"


def _show(found: list[Replica], output: Output) -> None:
    table = Table(output, "node", "address", "tier", ">size", "pin")
    for replica in found:
        node, item = replica.node, replica.object
        output.record(**objects.as_json(node, item))
        table.add(
            node.name,
            node.endpoint.rpc_address,
            objects.tier(item),
            size(item.length),
            objects.PINS[item.pin] or "none",
        )
    table.flush()
