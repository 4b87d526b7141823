"""`kvctl ls`, `stat` and `nodes`: show the contents and the nodes of the store. They change nothing."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import groupby
from typing import Any

from moonserve.deploy.admin import kvctl_objects
from moonserve.deploy.admin.kvctl_cluster import Node, StoreCluster, report_lost
from moonserve.deploy.admin.kvctl_objects import Replica
from moonserve.deploy.terminal import (
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_USAGE,
    Output,
    Table,
    bar,
    count,
    size,
)
from moonserve.protocol.errors import MoonserveError, PeerLost
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.pb import directory_pb2, kvstore_pb2
from moonserve.protocol.process.progress_bars import duration

DEFAULT_LIMIT = 100
ROWS_AT_ONCE = 500
Stats = kvstore_pb2.StoreStatsReply


def add_ls(verbs: kvctl_objects.Verbs, common: ArgumentParser) -> None:
    parser = kvctl_objects.add(verbs, "ls", run_ls, common, "list objects")
    parser.add_argument("--tenant", help="only those of this tenant")
    parser.add_argument("--disk-only", action="store_true", help="only those that are not in memory")
    limit = f"stop after so many (default {DEFAULT_LIMIT}; 0 = never)"
    parser.add_argument("--limit", type=int, default=DEFAULT_LIMIT, help=limit)


async def run_ls(arguments: Namespace, cluster: StoreCluster, output: Output) -> int:
    limit: int = arguments.limit
    if limit < 0:
        output.problem("--limit must be 0 or more")
        return EXIT_USAGE
    stats = await cluster.stats(await cluster.nodes())
    columns = ("key", "node", "tier", ">size", "pin", ">holds", ">followers", "tenant")
    table, shown = Table(output, *columns), 0
    for node, _ in stats.replies:
        try:
            async with aclosing(cluster.objects(node)) as found:
                async for item in found:
                    if (arguments.disk_only and item.in_memory) or arguments.tenant not in (None, item.tenant):
                        continue
                    shown += 1
                    if 0 < limit < shown:  # there are more objects
                        break
                    output.record(**kvctl_objects.as_json(node, item))
                    table.add(*kvctl_objects.cells(Replica(node, item), columns, output))
                    if shown % ROWS_AT_ONCE == 0:
                        table.flush()
        except PeerLost as error:
            stats.lost.append((node, error))
        table.flush()
        if 0 < limit < shown:
            output.note(f"… {_more(arguments, [reply for _, reply in stats.replies])}")
            break
    if not shown:
        output.note("no objects")
    return report_lost(stats, output)


def _more(arguments: Namespace, stats: Sequence[Stats]) -> str:
    if arguments.tenant is not None:  # nodes do not count by tenant
        return "and more (--limit 0 lists all)"
    total = sum(each.num_on_disk if arguments.disk_only else each.num_objects for each in stats)
    more = count(max(1, total - arguments.limit), "more object")
    return f"and {more} (--limit 0 lists all)"


Above = tuple[BlockKey, list[Replica]]


def add_stat(verbs: kvctl_objects.Verbs, common: ArgumentParser) -> None:
    parser = kvctl_objects.add(verbs, "stat", run_stat, common, "show an object's replicas and its chain")
    kvctl_objects.add_key(parser)


async def run_stat(arguments: Namespace, cluster: StoreCluster, output: Output) -> int:
    key = kvctl_objects.parse(arguments.key, plain=arguments.plain)
    answers = await kvctl_objects.replicas(cluster, await cluster.nodes(), key)
    found = kvctl_objects.present(answers)
    code = report_lost(answers, output)
    if found:
        holding = {replica.node.name for replica in found}
        # Nodes with the block come first: each further parent is read from the first node that has the object.
        nodes = sorted((n for n, _ in answers.replies), key=lambda node: node.name not in holding)
        above = [each async for each in kvctl_objects.ancestors(cluster, nodes, found)]
        _show(key, found, above, output)
    elif code == EXIT_OK:
        output.problem(kvctl_objects.no_such_key(arguments.key))
        return EXIT_NOT_FOUND
    return code


def _show(key: BlockKey, found: Sequence[Replica], above: Sequence[Above], output: Output) -> None:
    chain = [
        {"key": key.hex(), "nodes": {each.node.name: kvctl_objects.tier(each.object) for each in there}}
        for key, there in above
    ]
    output.record(
        key=key.hex(),
        replicas=[kvctl_objects.as_json(replica.node, replica.object) for replica in found],
        chain=chain,
        reaches_head=not above or bool(above[-1][1]),
    )
    first = found[0]
    output.line(f"key      {key.hex()}")
    output.line(f"parent   {first.parent.hex() if first.parent else 'none, a chain starts here'}")
    output.line(f"size     {size(first.object.length)} ({first.object.length:,} bytes)")
    output.line(f"tenant   {first.object.tenant or 'none'}")
    output.line()
    kvctl_objects.show_replicas(found, output)
    if len({replica.object.checksum for replica in found}) > 1:
        output.line("the replicas differ: two writers stored different bytes under this key")
    output.line()
    if above:
        _show_chain(above, output)


def _show_chain(above: Sequence[Above], output: Output) -> None:
    """Prints adjacent ancestors on the same nodes as one row, so that a chain of hundreds of blocks stays readable."""
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
        output.line(f"broken   {above[-1][0].hex()} is on no node: blocks below it cannot be used")
    else:
        output.line("the chain is complete up to its head")


def _where(found: Sequence[Replica]) -> str:
    return ", ".join(f"{replica.node.name} ({kvctl_objects.tier(replica.object)})" for replica in found)


def _state(stats: Stats) -> str:
    """Returns the most urgent state for an operator."""
    if stats.draining:
        return "draining"
    return f"recovered {stats.recovered:.0%}" if stats.disk_limit_bytes and stats.recovered < 1 else "ok"


def _memory(stats: Stats) -> str:
    used = 1 - stats.free_bytes / stats.capacity_bytes if stats.capacity_bytes else 0.0
    return f"{bar(used)} {used:4.0%} of {size(stats.capacity_bytes)}"


def _disk(stats: Stats) -> str:
    """Formats disk usage. The health is shown only if it is not good, so that it is noticed."""
    if not stats.disk_limit_bytes:
        return "none" if stats.disk_health in ("", "none") else stats.disk_health
    health = "" if stats.disk_health == "good" else f" {stats.disk_health}"
    used = stats.disk_live_bytes / stats.disk_limit_bytes
    return f"{used:4.0%} of {size(stats.disk_limit_bytes)}{health}"


def _hits(stats: Stats) -> str:
    ratio = hit_ratio(stats.counters)
    return "–" if ratio is None else f"{ratio:.1%}"


def hit_ratio(counters: Mapping[str, int]) -> float | None:
    """Returns the share of objects requested since the node's start that it had; None if none was requested."""
    hits, misses = counters.get("lease_hits", 0), counters.get("lease_misses", 0)
    return hits / (hits + misses) if hits + misses else None


_COLUMNS: dict[str, Callable[[Stats], str]] = {
    "state": _state,
    "memory": _memory,
    "disk": _disk,
    ">objects": lambda stats: f"{stats.num_objects:,}",
    ">disk only": lambda stats: f"{stats.num_on_disk:,}",
    ">hits": _hits,
    ">evicted": lambda stats: f"{stats.counters.get('evictions_succeeded', 0):,}",
    ">corrupt": lambda stats: f"{stats.counters.get('integrity_failures', 0):,}",
}
_LONG_COLUMNS: dict[str, Callable[[Stats], str]] = {
    ">leased": lambda stats: size(stats.leased_bytes),
    ">reserved": lambda stats: size(stats.reserved_bytes),
    ">metadata": lambda stats: size(stats.metadata_bytes),
}
_JSON_FIELDS = (
    *("draining", "recovered", "capacity_bytes", "free_bytes", "held_bytes", "leased_bytes"),
    *("reserved_bytes", "metadata_bytes", "disk_health", "disk_limit_bytes", "disk_live_bytes"),
    *("num_objects", "num_on_disk"),
)


def add_nodes(verbs: kvctl_objects.Verbs, common: ArgumentParser) -> None:
    kvctl_objects.add(verbs, "nodes", run_nodes, common, "show every node: memory, disk, hits, health")


async def run_nodes(arguments: Namespace, cluster: StoreCluster, output: Output) -> int:
    nodes = await cluster.nodes()
    stats = await cluster.stats(nodes)
    heard = await _heard(cluster, output)
    answered = {node.name: reply for node, reply in stats.replies}
    lost = {node.name: error.message for node, error in stats.lost}
    long = ("epoch", "host", *_LONG_COLUMNS) if output.long else ()
    table = Table(output, "node", "address", *_COLUMNS, ">heard", *long)
    for node in nodes:
        name, endpoint, reply = node.name, node.endpoint, answered.get(node.name)
        told = {"lost": lost.get(name, "")} if reply is None else _as_json(reply)
        output.record(**_known(node, heard.get(name)), **told)

        last = duration(heard[name]) if name in heard else "–"
        row = ["lost", *[""] * (len(_COLUMNS) - 1)] if reply is None else _cells(reply, _COLUMNS)
        more: Sequence[str] = ()
        if output.long:
            sizes = [""] * len(_LONG_COLUMNS) if reply is None else _cells(reply, _LONG_COLUMNS)
            more = (str(endpoint.epoch), endpoint.host, *sizes)
        table.add(name, endpoint.rpc_address, *row, last, *more)
    table.flush()
    return report_lost(stats, output)


def _cells(stats: Stats, columns: Mapping[str, Callable[[Stats], str]]) -> list[str]:
    return [cell(stats) for cell in columns.values()]


async def _heard(cluster: StoreCluster, output: Output) -> dict[str, float]:
    """Returns the seconds since the directory heard from each node. Without a directory it is empty: not an error."""
    try:
        directory = await cluster.directory()
        if directory is None:
            return {}
        request = directory_pb2.GetNodesRequest()
        reply = await cluster.call(directory, directory.stub.GetNodes, request)
    except MoonserveError as error:
        output.note(f"not known when they were heard last: {error.message}")
        return {}
    return {view.endpoint.instance_id: view.last_heard_s for view in reply.nodes}


def _known(node: Node, heard_s: float | None) -> dict[str, Any]:
    return {
        "node": node.name,
        "address": node.endpoint.rpc_address,
        "host": node.endpoint.host,
        "epoch": str(node.endpoint.epoch),  # too large for an exact JSON number
        "last_heard_s": heard_s,
    }


def _as_json(stats: Stats) -> dict[str, Any]:
    return {
        "state": _state(stats),
        **{name: getattr(stats, name) for name in _JSON_FIELDS},
        "hit_ratio": hit_ratio(stats.counters),
        "tenant_bytes": dict(stats.tenant_bytes),
        "counters": dict(stats.counters),
    }
