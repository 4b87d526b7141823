"""`kvctl pin`: how much objects may be evicted, on all their replicas."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from deploy.kvctl import keys, objects, verb
from deploy.kvctl.cluster import Cluster, Node, gathered, tell_lost
from deploy.terminal.endings import EXIT_NOT_FOUND, EXIT_OK, EXIT_UNREACHABLE
from deploy.terminal.output import Output, count
from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2

_PINS = {
    "soft": kvstore_pb2.STORE_PIN_SOFT,
    "hard": kvstore_pb2.STORE_PIN_HARD,
    "none": kvstore_pb2.STORE_PIN_NONE,
}


def add_to(verbs: verb.Verbs, common: ArgumentParser) -> None:
    parser = verb.add(
        verbs, "pin", run, common, "keep objects from being evicted, or let them again"
    )
    keys.add_to(parser, several=True)
    kind = parser.add_mutually_exclusive_group(required=True)
    for name, text in (
        ("soft", "evicted after everything without a pin"),
        ("hard", "never evicted"),
        ("none", "evicted like others"),
    ):
        kind.add_argument(f"--{name}", dest="pin", action="store_const", const=name, help=text)
    parser.add_argument(
        "--chain", action="store_true", help="and all resident blocks that lead to them"
    )


async def run(arguments: Namespace, cluster: Cluster, output: Output) -> int:
    texts = keys.texts_by_key(arguments.keys, arguments)
    nodes = await cluster.nodes()
    wanted = list(texts)
    if arguments.chain:
        chains = [await objects.chain_of(cluster, nodes, key) for key in texts]
        wanted = list(dict.fromkeys([key for chain in chains for key in chain] + wanted))
    answers = await objects.holders(cluster, nodes, wanted)
    there = {node: held for node, held in answers.replies if held}
    pinned = await gathered(
        list(there), lambda node: _pin(cluster, node, there[node], arguments.pin)
    )
    found = {key for held in there.values() for key in held}
    answers.lost += pinned.lost
    _tell(arguments.pin, len(found), [replies for _, replies in pinned.replies], output)
    missing = [text for key, text in texts.items() if key not in found]
    for text in missing:
        output.problem(keys.no_such_key(text))
    tell_lost(answers, output)
    if answers.lost:
        return EXIT_UNREACHABLE
    return EXIT_NOT_FOUND if missing else EXIT_OK


async def _pin(cluster: Cluster, node: Node, held: Sequence[BlockKey], pin: str) -> int:
    """How many replicas were there."""
    pinned = 0
    for piece in objects.pieces(held):
        request = kvstore_pb2.StorePinRequest(keys=piece, pin=_PINS[pin])
        pinned += (await cluster.call(node, node.stub.Pin, request)).pinned
    return pinned


def _tell(pin: str, num_objects: int, pinned: Sequence[int], output: Output) -> None:
    output.record(pin=pin, objects=num_objects, replicas=sum(pinned), nodes=len(pinned))
    done = "unpinned" if pin == "none" else f"pinned ({pin})"
    where = f"{count(sum(pinned), 'replica')} on {count(len(pinned), 'node')}"
    if num_objects:
        output.line(f"{done} {count(num_objects, 'object')}: {where}")
