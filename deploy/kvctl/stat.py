"""`kvctl stat`: all about one object: its replicas, and the chain that leads to it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import groupby

from deploy.kvctl import keys, objects, verb
from deploy.kvctl.cluster import Cluster, Node, tell_lost
from deploy.kvctl.objects import Replica
from deploy.terminal.amounts import size
from deploy.terminal.endings import EXIT_NOT_FOUND, EXIT_OK, EXIT_UNREACHABLE
from deploy.terminal.output import Output, Table, count
from protocol.keys import BlockKey

Above = tuple[BlockKey, list[Replica]]


def add_to(verbs: verb.Verbs, common: ArgumentParser) -> None:
    parser = verb.add(verbs, "stat", run, common, "show an object's replicas and its chain")
    keys.add_to(parser)


async def run(arguments: Namespace, cluster: Cluster, output: Output) -> int:
    key = keys.parse(arguments.key, plain=arguments.plain)
    nodes = await cluster.nodes()
    answers = await objects.replicas(cluster, nodes, key)
    found = objects.present(answers)
    tell_lost(answers, output)
    if found:
        above = await _above(cluster, [node for node, _ in answers.replies], found)
        _show(key, found, above, output)
    elif not answers.lost:
        output.problem(keys.no_such_key(arguments.key))
        return EXIT_NOT_FOUND
    return EXIT_UNREACHABLE if answers.lost else EXIT_OK


async def _above(cluster: Cluster, nodes: Sequence[Node], found: Sequence[Replica]) -> list[Above]:
    reachable = {replica.node.name for replica in found}
    # Those that hold the block first: the parents' parents are read from the first that has one.
    ordered = sorted(nodes, key=lambda node: node.name not in reachable)
    return [above async for above in objects.ancestors(cluster, ordered, found)]


def _show(key: BlockKey, found: Sequence[Replica], above: Sequence[Above], output: Output) -> None:
    output.record(
        key=key.hex(),
        replicas=[objects.as_json(replica.node, replica.object) for replica in found],
        chain=[_chain_json(*ancestor) for ancestor in above],
        reaches_head=not above or bool(above[-1][1]),
    )
    first = found[0]
    output.line(f"key      {key.hex()}")
    output.line(f"parent   {first.parent.hex() if first.parent else 'none, a chain starts here'}")
    output.line(f"size     {size(first.object.length)} ({first.object.length:,} bytes)")
    output.line(f"tenant   {first.object.tenant or 'none'}")
    output.line()
    _show_replicas(found, output)
    output.line()
    _show_chain(above, output)


def _show_replicas(found: Sequence[Replica], output: Output) -> None:
    table = Table(
        output,
        *("node", "tier", ">bytes", "checksum", "generation", "pin", ">holds", ">followers"),
    )
    for replica in found:
        item = replica.object
        table.add(
            replica.node.name,
            objects.tier(item),
            f"{item.length:,}",
            f"{item.checksum:016x}",
            f"{item.generation:x}",
            objects.PINS[item.pin] or "none",
            str(item.holds),
            str(item.followers),
        )
    table.flush()
    if len({replica.object.checksum for replica in found}) > 1:
        output.line("the replicas differ: two writers stored different bytes under this key")


def _show_chain(above: Sequence[Above], output: Output) -> None:
    """Neighbours that are on the same nodes are one row, so that a chain of hundreds stays readable."""
    if not above:
        return
    is_broken = not above[-1][1]
    resident = above[:-1] if is_broken else above
    if resident:
        output.line(f"chain    {count(len(resident), 'block')} above, nearest first")
        table = Table(output, ">blocks", "from", "to", "where")
        for where, run in groupby(resident, key=lambda ancestor: _where(ancestor[1])):
            part = list(run)
            table.add(str(len(part)), output.key(part[0][0]), output.key(part[-1][0]), where)
        table.flush()
    if is_broken:
        output.line(f"broken   {above[-1][0].hex()} is on no node: what is below it cannot be used")
    else:
        output.line("the head of the chain is there")


def _where(found: Sequence[Replica]) -> str:
    return ", ".join(f"{replica.node.name} ({objects.tier(replica.object)})" for replica in found)


def _chain_json(key: BlockKey, found: Sequence[Replica]) -> dict[str, object]:
    return {
        "key": key.hex(),
        "nodes": {replica.node.name: objects.tier(replica.object) for replica in found},
    }
