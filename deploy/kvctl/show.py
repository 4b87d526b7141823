"""`kvctl ls`, `stat` and `nodes`: what the store holds. Changes nothing."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from itertools import groupby
from typing import Any

from deploy.kvctl import objects
from deploy.kvctl.cluster import Answers, Cluster, Node, Object, tell_lost
from deploy.kvctl.objects import Replica
from deploy.terminal.client import EXIT_NOT_FOUND, EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE
from deploy.terminal.output import Output, Table, bar, count, size
from protocol.errors import MoonserveError, PeerLost
from protocol.keys import BlockKey
from protocol.pb import directory_pb2, kvstore_pb2
from protocol.progress import duration

DEFAULT_LIMIT = 100
ROWS_AT_ONCE = 500


def add_ls(verbs: objects.Verbs, common: ArgumentParser) -> None:
    parser = objects.add(verbs, "ls", run_ls, common, "list objects")
    parser.add_argument("--tenant", help="only those of this tenant")
    parser.add_argument(
        "--disk-only", action="store_true", help="only those that are not in memory"
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=DEFAULT_LIMIT,
        help=f"stop after so many (default {DEFAULT_LIMIT}; 0 = never)",
    )


async def run_ls(arguments: Namespace, cluster: Cluster, output: Output) -> int:
    if arguments.limit < 0:
        output.problem("--limit must be 0 or more")
        return EXIT_USAGE
    stats = await cluster.stats(await cluster.nodes())
    listing = _Listing(arguments, output)
    for node, _ in stats.replies:
        try:
            await listing.show(node, cluster.objects(node))
        except PeerLost as error:
            stats.lost.append((node, error))
        if listing.is_full:
            break
    listing.finish(stats)
    tell_lost(stats, output)
    return EXIT_UNREACHABLE if stats.lost else EXIT_OK


class _Listing:
    """What was shown so far."""

    def __init__(self, arguments: Namespace, output: Output) -> None:
        self._arguments = arguments
        self._output = output
        self._shown = 0
        self._table = Table(
            output, "key", "node", "tier", ">size", "pin", ">holds", ">followers", "tenant"
        )
        self.is_full = False

    async def show(self, node: Node, found: AsyncGenerator[Object, None]) -> None:
        try:
            async with aclosing(found) as listed:
                async for item in listed:
                    if self._is_wanted(item):
                        if self._reached_limit():
                            return
                        self._add(node, item)
        finally:
            self._table.flush()

    def finish(self, stats: Answers[kvstore_pb2.StoreStatsReply]) -> None:
        """Says how many more there are."""
        if self._shown == 0:
            self._output.note("no objects")
        elif self.is_full:
            more = self._more([reply for _, reply in stats.replies])
            self._output.note(f"… {more} (--limit 0 lists all)")

    def _is_wanted(self, found: Object) -> bool:
        arguments = self._arguments
        if arguments.disk_only and found.in_memory:
            return False
        return arguments.tenant is None or found.tenant == arguments.tenant

    def _reached_limit(self) -> bool:
        self.is_full = 0 < self._arguments.limit <= self._shown
        return self.is_full

    def _add(self, node: Node, found: Object) -> None:
        self._shown += 1
        self._output.record(**objects.as_json(node, found))
        self._table.add(
            self._output.key(found.key),
            node.name,
            objects.tier(found),
            size(found.length),
            objects.PINS[found.pin],
            str(found.holds),
            str(found.followers),
            found.tenant,
        )
        if self._shown % ROWS_AT_ONCE == 0:
            self._table.flush()

    def _more(self, stats: Sequence[kvstore_pb2.StoreStatsReply]) -> str:
        if self._arguments.tenant is not None:  # nodes do not count by tenant
            return "and more"
        on_disk = self._arguments.disk_only
        total = sum(reply.num_on_disk if on_disk else reply.num_objects for reply in stats)
        return f"and {count(max(1, total - self._shown), 'more object')}"


Above = tuple[BlockKey, list[Replica]]


def add_stat(verbs: objects.Verbs, common: ArgumentParser) -> None:
    parser = objects.add(verbs, "stat", run_stat, common, "show an object's replicas and its chain")
    objects.add_key(parser)


async def run_stat(arguments: Namespace, cluster: Cluster, output: Output) -> int:
    key = objects.parse(arguments.key, plain=arguments.plain)
    nodes = await cluster.nodes()
    answers = await objects.replicas(cluster, nodes, key)
    found = objects.present(answers)
    tell_lost(answers, output)
    if found:
        above = await _above(cluster, [node for node, _ in answers.replies], found)
        _show(key, found, above, output)
    elif not answers.lost:
        output.problem(objects.no_such_key(arguments.key))
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


Stats = kvstore_pb2.StoreStatsReply
COLUMNS = (
    *("node", "address", "state", "memory", "disk", ">objects", ">disk only"),
    *(">hits", ">evicted", ">corrupt", ">heard"),
)
LONG_COLUMNS = ("epoch", "host", ">leased", ">reserved", ">metadata")


def add_nodes(verbs: objects.Verbs, common: ArgumentParser) -> None:
    objects.add(verbs, "nodes", run_nodes, common, "show every node: memory, disk, hits, health")


async def run_nodes(arguments: Namespace, cluster: Cluster, output: Output) -> int:
    nodes = await cluster.nodes()
    stats = await cluster.stats(nodes)
    heard = await _heard(cluster, output)
    answered = {node.name: reply for node, reply in stats.replies}
    lost = {node.name: error for node, error in stats.lost}
    table = Table(output, *COLUMNS, *(LONG_COLUMNS if output.long else ()))
    for node in nodes:
        name, reply = node.name, answered.get(node.name)
        output.record(**_as_json(node, reply, lost.get(name), heard.get(name)))
        cells = _cells(node, reply) if reply else ("lost", *[""] * (len(COLUMNS) - 4))
        last = "–" if name not in heard else duration(heard[name])
        more = _long_cells(node, reply) if output.long else ()
        table.add(name, node.endpoint.rpc_address, *cells, last, *more)
    table.flush()
    tell_lost(stats, output)
    return EXIT_UNREACHABLE if stats.lost else EXIT_OK


async def _heard(cluster: Cluster, output: Output) -> dict[str, float]:
    """Seconds since the directory heard of each node; empty without a directory, which is no reason to fail."""
    try:
        directory = await cluster.directory()
        if directory is None:
            return {}
        reply = await cluster.call(
            directory, directory.stub.GetNodes, directory_pb2.GetNodesRequest()
        )
    except MoonserveError as error:
        output.note(f"not known when they were heard last: {error.message}")
        return {}
    return {view.endpoint.instance_id: view.last_heard_s for view in reply.nodes}


def _cells(node: Node, stats: Stats) -> tuple[str, ...]:
    ratio = hit_ratio(stats.counters)
    return (
        _state(stats),
        _memory(stats),
        _disk(stats),
        f"{stats.num_objects:,}",
        f"{stats.num_on_disk:,}",
        "–" if ratio is None else f"{ratio:.1%}",
        f"{stats.counters.get('evictions_succeeded', 0):,}",
        f"{stats.counters.get('integrity_failures', 0):,}",
    )


def _memory(stats: Stats) -> str:
    used = 1 - stats.free_bytes / stats.capacity_bytes if stats.capacity_bytes else 0.0
    return f"{bar(used)} {used:4.0%} of {size(stats.capacity_bytes)}"


def _disk(stats: Stats) -> str:
    """Its health only where it is not good: it must be seen."""
    if not stats.disk_limit_bytes:
        return "none" if stats.disk_health in ("", "none") else stats.disk_health
    health = "" if stats.disk_health == "good" else f" {stats.disk_health}"
    used = stats.disk_live_bytes / stats.disk_limit_bytes
    return f"{used:4.0%} of {size(stats.disk_limit_bytes)}{health}"


def _long_cells(node: Node, stats: Stats | None) -> tuple[str, ...]:
    parts = [stats.leased_bytes, stats.reserved_bytes, stats.metadata_bytes] if stats else []
    return (
        str(node.endpoint.epoch),
        node.endpoint.host,
        *([size(part) for part in parts] or [""] * 3),
    )


def _state(stats: Stats) -> str:
    """The most urgent thing that an operator should know."""
    if stats.draining:
        return "draining"
    if stats.disk_limit_bytes and stats.recovered < 1:
        return f"recovered {stats.recovered:.0%}"
    return "ok"


def hit_ratio(counters: Mapping[str, int]) -> float | None:
    """Of the objects that were asked for since the node's start; None when there were none."""
    hits, misses = counters.get("lease_hits", 0), counters.get("lease_misses", 0)
    return hits / (hits + misses) if hits + misses else None


def _as_json(
    node: Node, stats: Stats | None, error: MoonserveError | None, heard_s: float | None
) -> dict[str, Any]:
    known = {
        "node": node.name,
        "address": node.endpoint.rpc_address,
        "host": node.endpoint.host,
        "epoch": str(node.endpoint.epoch),  # above what JSON readers keep exactly
        "last_heard_s": heard_s,
    }
    if stats is None:
        return {**known, "lost": error.message if error else ""}
    return {**known, **_stats_json(stats)}


_TOLD = (
    *("draining", "recovered", "capacity_bytes", "free_bytes", "held_bytes", "leased_bytes"),
    *("reserved_bytes", "metadata_bytes", "disk_health", "disk_limit_bytes", "disk_live_bytes"),
    *("num_objects", "num_on_disk"),
)


def _stats_json(stats: Stats) -> dict[str, Any]:
    return {
        "state": _state(stats),
        **{name: getattr(stats, name) for name in _TOLD},
        "hit_ratio": hit_ratio(stats.counters),
        "tenant_bytes": dict(stats.tenant_bytes),
        "counters": dict(stats.counters),
    }
