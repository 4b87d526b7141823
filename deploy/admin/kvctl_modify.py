"""`kvctl replicas`, `pin`, `drop` and `verify`: change objects on every node that holds them."""

from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moonserve.deploy.admin import kvctl_objects
from moonserve.deploy.admin.kvctl_cluster import Node, Replies, StoreCluster, gather_replies, report_lost
from moonserve.deploy.terminal import EXIT_NOT_FOUND, EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE, Output, count
from moonserve.kvstore.client.cluster import new_removal_id
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.pb import directory_pb2, kvstore_pb2
from moonserve.protocol.process.progress_bars import ProgressBars

Change = directory_pb2.ChangeReplicaReply
# The change includes the chain, and each call copies for at most 30 s.
CHANGE_TIMEOUT_S = 120.0


def add_replicas(verbs: kvctl_objects.Verbs, common: ArgumentParser) -> None:
    text = "show an object's replicas; with N, make it so many"
    parser = kvctl_objects.add(verbs, "replicas", run_replicas, common, text)
    kvctl_objects.add_key(parser)
    text = "replicas from now on; what leads to the object gains them too"
    parser.add_argument("num_replicas", metavar="N", type=int, nargs="?", help=text)


async def run_replicas(arguments: Namespace, cluster: StoreCluster, output: Output) -> int:
    key, wanted = kvctl_objects.parse(arguments.key, plain=arguments.plain), arguments.num_replicas
    if wanted is not None and wanted < 1:
        output.problem("N must be at least 1; `kvctl drop` removes an object")
        return EXIT_USAGE
    nodes = await cluster.nodes()
    changed: Change | None = None
    if wanted is not None:
        directory = await cluster.directory()
        if directory is None:
            output.problem(
                "replicas are changed by the directory, and the registry knows none; start moonserve directory"
            )
            return EXIT_USAGE
        request = directory_pb2.ChangeReplicaRequest(keys=key, num_replicas=wanted)
        call = directory.stub.ChangeReplica
        changed = await cluster.call(directory, call, request, timeout_s=CHANGE_TIMEOUT_S)
        if changed.created or changed.dropped:
            created = count(changed.created, "replica")
            output.note(f"created {created}, dropped {changed.dropped:,} (its chain's included)")
    answers = await kvctl_objects.replicas(cluster, nodes, key)
    found = kvctl_objects.present(answers)
    report_lost(answers, output)
    for replica in found:
        output.record(**kvctl_objects.as_json(replica.node, replica.object))
    kvctl_objects.show_replicas(found, output)
    if answers.lost:
        return EXIT_UNREACHABLE
    if not found:
        output.problem(kvctl_objects.no_such_key(arguments.key))
    elif changed is not None and len(found) != wanted:
        output.problem(_why(wanted, len(found), changed))
    return EXIT_OK if found and wanted in (None, len(found)) else EXIT_NOT_FOUND


def _why(wanted: int, there: int, changed: Change) -> str:
    if changed.missing:
        return "the directory does not know this object yet; repeat the command in a second"
    if changed.failed:
        failed = count(changed.failed, "replica")
        return f"{failed} could not be made; repeat the command, which tries another node"
    fewer = "no other node takes replicas now; see kvctl nodes"
    more = "a block that others follow keeps its replicas"
    return f"{wanted} wanted, {there} there: {fewer if there < wanted else more}"


_PINS = {name: pin for pin, name in kvctl_objects.PINS.items()}


def add_pin(verbs: kvctl_objects.Verbs, common: ArgumentParser) -> None:
    text = "keep objects from being evicted, or let them again"
    parser = kvctl_objects.add(verbs, "pin", run_pin, common, text)
    kvctl_objects.add_key(parser, several=True)
    kind = parser.add_mutually_exclusive_group(required=True)
    for name, text in (
        ("soft", "evicted after everything without a pin"),
        ("hard", "never evicted"),
        ("none", "evicted like others"),
    ):
        kind.add_argument(f"--{name}", dest="pin", action="store_const", const=name, help=text)
    text = "and all resident blocks that lead to them"
    parser.add_argument("--chain", action="store_true", help=text)


async def run_pin(arguments: Namespace, cluster: StoreCluster, output: Output) -> int:
    texts = kvctl_objects.texts_by_key(arguments.keys, arguments)
    nodes = await cluster.nodes()
    wanted = list(texts)
    if arguments.chain:
        chains = [await kvctl_objects.chain_of(cluster, nodes, key) for key in texts]
        wanted = list(dict.fromkeys([key for chain in chains for key in chain] + wanted))
    answers = await kvctl_objects.holders(cluster, nodes, wanted)
    there = {node: held for node, held in answers.replies if held}

    async def pin(node: Node) -> int:
        """Returns the number of replicas that the node had."""
        pinned = 0
        for piece in kvctl_objects.pieces(there[node]):
            request = kvstore_pb2.StorePinRequest(keys=piece, pin=_PINS[arguments.pin])
            pinned += (await cluster.call(node, node.stub.Pin, request)).pinned
        return pinned

    pinned = await _change_all(list(there), pin, answers)
    found = {key for held in there.values() for key in held}
    done = "unpinned" if arguments.pin == "none" else f"pinned ({arguments.pin})"
    return _report(done, {"pin": arguments.pin}, pinned, found, texts, answers, output)


MAX_DROPPED_WITHOUT_YES = 10
"""More objects than this need --yes, in case a glob or a chain's head was given by mistake."""


def add_drop(verbs: kvctl_objects.Verbs, common: ArgumentParser) -> None:
    parser = kvctl_objects.add(verbs, "drop", run_drop, common, "remove objects from every node")
    kvctl_objects.add_key(parser, several=True)
    text = "and all blocks that follow them; lists every node"
    parser.add_argument("--chain-below", action="store_true", help=text)
    text = f"needed for more than {MAX_DROPPED_WITHOUT_YES} objects"
    parser.add_argument("--yes", action="store_true", help=text)


async def run_drop(arguments: Namespace, cluster: StoreCluster, output: Output) -> int:
    texts = kvctl_objects.texts_by_key(arguments.keys, arguments)
    nodes = await cluster.nodes()
    wanted = list(texts)
    if arguments.chain_below:
        wanted = await kvctl_objects.descendants(cluster, nodes, wanted)
    answers = await kvctl_objects.holders(cluster, nodes, wanted)
    found = {key for _, held in answers.replies for key in held}
    if len(found) > MAX_DROPPED_WITHOUT_YES and not arguments.yes:
        output.problem(f"this would drop {count(len(found), 'object')}; confirm with --yes")
        return EXIT_USAGE
    # Every node is notified, also one without the objects: it later notifies nodes that cannot be reached now. With
    # --node, the removal applies only to the given nodes (id 0).
    removal_id = 0 if cluster.is_limited else new_removal_id()

    async def remove(node: Node) -> int:
        """Removes the objects in the order of `wanted`, so that no block remains without its ancestors."""
        removed = 0
        for piece in kvctl_objects.pieces(wanted):
            request = kvstore_pb2.StoreRemoveRequest(keys=piece, removal_id=removal_id)
            removed += (await cluster.call(node, node.stub.Remove, request)).removed
        return removed

    removed = await _change_all([node for node, _ in answers.replies], remove, answers)
    code = _report("dropped", {}, removed, found, texts, answers, output)
    if answers.lost:
        output.problem("nodes that were not reached may hold them until they rejoin")
    return code


def add_verify(verbs: kvctl_objects.Verbs, common: ArgumentParser) -> None:
    help = "compare every object with its checksum, in memory and on disk; drop what is corrupt"
    kvctl_objects.add(verbs, "verify", run_verify, common, help)


async def run_verify(arguments: Namespace, cluster: StoreCluster, output: Output) -> int:
    nodes = await cluster.nodes()
    passes = {node: _Pass() for node in nodes}
    with output.progress() as progress:
        answers = await gather_replies(nodes, lambda node: passes[node].follow(cluster, node, progress))
    # Includes nodes that were lost during the pass: the objects that they had found are dropped.
    corrupt = [key for done in passes.values() for key in done.corrupt]
    others = await kvctl_objects.holders(cluster, await cluster.all_nodes(), corrupt)
    lost = {node for node, _ in answers.lost}
    for node, done in passes.items():
        keys = [key.hex() for key in done.corrupt]
        output.record(node=node.name, checked=done.checked, total=done.total, corrupt=keys)
        for key in done.corrupt:
            left = ", ".join(other.name for other, held in others.replies if key in held)
            fate = f"still on {left}" if left else "it was the only replica"
            output.line(f"{node.name}: corrupt {key.hex()}, dropped; {fate}")
        what = f"{len(keys):,} corrupt" if keys else "all good"
        until = " before it was lost" if node in lost else ""
        if done.checked or not until:
            output.line(f"{node.name}: {count(done.checked, 'object')} checked{until}, {what}")
    return report_lost(answers, output) or (EXIT_NOT_FOUND if corrupt else EXIT_OK)


@dataclass(slots=True)
class _Pass:
    """Verification of one node."""

    checked: int = 0
    total: int = 0
    corrupt: list[BlockKey] = field(default_factory=list)

    async def follow(self, cluster: StoreCluster, node: Node, progress: ProgressBars) -> None:
        async for found in cluster.stream(node, node.stub.Verify, kvstore_pb2.StoreVerifyRequest()):
            self.checked, self.total = found.checked, found.total
            self.corrupt += [BlockKey(key) for key in found.corrupt]
            text = f"{found.checked:,} of {count(found.total, 'object')}"
            progress.show(node.name, found.checked, found.total, text)


async def _change_all(
    nodes: Sequence[Node], change: Callable[[Node], Awaitable[int]], answers: Replies[Any]
) -> list[int]:
    """Returns the number of replicas per node that had any. Adds lost nodes to `answers`."""
    changed = await gather_replies(nodes, change)
    answers.lost += changed.lost
    return [number for _, number in changed.replies if number]


def _report(
    done: str,
    told: Mapping[str, str],
    changed: Sequence[int],
    found: Collection[BlockKey],
    texts: Mapping[BlockKey, str],
    answers: Replies[list[BlockKey]],
    output: Output,
) -> int:
    """Prints what was `done` to the keys that were found, the missing keys and the lost nodes, and returns the exit
    code. `changed`: numbers of replicas by node."""
    output.record(**told, objects=len(found), replicas=sum(changed), nodes=len(changed))
    if found:
        where = f"{count(sum(changed), 'replica')} on {count(len(changed), 'node')}"
        output.line(f"{done} {count(len(found), 'object')}: {where}")
    missing = [text for key, text in texts.items() if key not in found]
    for text in missing:
        output.problem(kvctl_objects.no_such_key(text))
    return report_lost(answers, output) or (EXIT_NOT_FOUND if missing else EXIT_OK)
