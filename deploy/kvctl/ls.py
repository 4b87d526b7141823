"""`kvctl ls`: objects, node by node, printed as they come."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from deploy.kvctl import objects, verb
from deploy.kvctl.cluster import Answers, Cluster, Node, Object, tell_lost
from deploy.terminal.amounts import size
from deploy.terminal.endings import EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE
from deploy.terminal.output import Output, Table, count
from protocol.errors import PeerLost
from protocol.pb import kvstore_pb2

DEFAULT_LIMIT = 100
ROWS_AT_ONCE = 500


def add_to(verbs: verb.Verbs, common: ArgumentParser) -> None:
    parser = verb.add(verbs, "ls", run, common, "list objects")
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


async def run(arguments: Namespace, cluster: Cluster, output: Output) -> int:
    if arguments.limit < 0:
        output.problem("--limit must be 0 or more")
        return EXIT_USAGE
    request = kvstore_pb2.StoreStatsRequest()
    stats = await cluster.ask(await cluster.nodes(), lambda node: node.stub.Stats, request)
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
