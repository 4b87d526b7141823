"""`kvctl nodes`: every store node at a glance."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from deploy.kvctl import verb
from deploy.kvctl.cluster import Cluster, Node, tell_lost
from deploy.terminal.amounts import size
from deploy.terminal.endings import EXIT_OK, EXIT_UNREACHABLE
from deploy.terminal.output import Output, Table, bar
from protocol.errors import MoonserveError
from protocol.pb import directory_pb2, kvstore_pb2
from protocol.progress import duration

Stats = kvstore_pb2.StoreStatsReply
COLUMNS = (
    *("node", "address", "state", "memory", "disk", ">objects", ">disk only"),
    *(">hits", ">evicted", ">corrupt", ">heard"),
)
LONG_COLUMNS = ("epoch", "host", ">leased", ">reserved", ">metadata")


def add_to(verbs: verb.Verbs, common: ArgumentParser) -> None:
    verb.add(verbs, "nodes", run, common, "show every node: memory, disk, hits, health")


async def run(arguments: Namespace, cluster: Cluster, output: Output) -> int:
    nodes = await cluster.nodes()
    stats = await cluster.ask(nodes, lambda node: node.stub.Stats, kvstore_pb2.StoreStatsRequest())
    heard = await _heard(cluster, output)
    answered = {node.name: reply for node, reply in stats.replies}
    lost = {node.name: error for node, error in stats.lost}
    table = Table(output, *COLUMNS, *(LONG_COLUMNS if output.long else ()))
    for node in nodes:
        name = node.name
        reply = answered.get(name)
        output.record(**_as_json(node, reply, lost.get(name), heard.get(name)))
        cells = (
            _cells(node, reply, heard.get(name)) if reply else _lost_cells(node, heard.get(name))
        )
        table.add(*cells, *(_long_cells(node, reply) if output.long else ()))
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


def _cells(node: Node, stats: Stats, heard_s: float | None) -> tuple[str, ...]:
    return (
        node.name,
        node.endpoint.rpc_address,
        _state(stats),
        _memory(stats),
        _disk(stats),
        f"{stats.num_objects:,}",
        f"{stats.num_on_disk:,}",
        _ratio_text(hit_ratio(stats.counters)),
        f"{stats.counters.get('evictions_succeeded', 0):,}",
        f"{stats.counters.get('integrity_failures', 0):,}",
        _heard_text(heard_s),
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


def _lost_cells(node: Node, heard_s: float | None) -> tuple[str, ...]:
    first = (node.name, node.endpoint.rpc_address, "lost")
    return (*first, *[""] * (len(COLUMNS) - len(first) - 1), _heard_text(heard_s))


def _long_cells(node: Node, stats: Stats | None) -> tuple[str, ...]:
    parts = (
        [size(stats.leased_bytes), size(stats.reserved_bytes), size(stats.metadata_bytes)]
        if stats
        else [""] * 3
    )
    return (str(node.endpoint.epoch), node.endpoint.host, *parts)


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


def _ratio_text(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.1%}"


def _heard_text(heard_s: float | None) -> str:
    return "–" if heard_s is None else duration(heard_s)


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


def _stats_json(stats: Stats) -> dict[str, Any]:
    return {
        "state": _state(stats),
        "draining": stats.draining,
        "recovered": stats.recovered,
        "capacity_bytes": stats.capacity_bytes,
        "free_bytes": stats.free_bytes,
        "held_bytes": stats.held_bytes,
        "leased_bytes": stats.leased_bytes,
        "reserved_bytes": stats.reserved_bytes,
        "metadata_bytes": stats.metadata_bytes,
        "disk_health": stats.disk_health,
        "disk_limit_bytes": stats.disk_limit_bytes,
        "disk_live_bytes": stats.disk_live_bytes,
        "num_objects": stats.num_objects,
        "num_on_disk": stats.num_on_disk,
        "hit_ratio": hit_ratio(stats.counters),
        "tenant_bytes": dict(stats.tenant_bytes),
        "counters": dict(stats.counters),
    }
