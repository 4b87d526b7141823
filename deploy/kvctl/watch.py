"""`kvctl watch`: follows all nodes' events until Ctrl-C.

Nodes come and go as the registry says; one that is lost is tried again for as long as it is a member. On a terminal a
table is redrawn each second; elsewhere, and with `--keys`, there are only lines, none while nothing happens.
"""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console
from rich.live import Live
from rich.table import Table

from deploy.kvctl import objects
from deploy.kvctl.cluster import Cluster, Node, Unreachable, reason
from deploy.terminal.client import EXIT_OK
from deploy.terminal.output import Output, grid
from kvstore.client.cluster import STORE_ROLE
from protocol.errors import MoonserveError
from protocol.keys import BlockKey, iter_keys
from protocol.pb import kvstore_pb2
from protocol.process import running
from protocol.registry.base import Member

_TIERS = {kvstore_pb2.STORE_TIER_MEMORY: "memory", kvstore_pb2.STORE_TIER_DISK: "disk"}


@dataclass(frozen=True, slots=True)
class Change:
    """`what`: added, moved, removed or read. `tier`: where it is then; empty for the latter two."""

    what: str
    key: BlockKey
    tier: str = ""


class Objects:
    """Which objects one node holds."""

    def __init__(self) -> None:
        self._there: set[BlockKey] = set()
        self._in_inventory = False

    def __len__(self) -> int:
        return len(self._there)

    def apply(self, message: kvstore_pb2.StoreEvents) -> Iterator[Change]:
        """Iterate to the end; nothing is changed before."""
        if message.snapshot:
            self._there, self._in_inventory = set(), True
        for change in self._changes(message):
            if not self._in_inventory:
                yield change
        self._in_inventory = self._in_inventory and message.more

    def _changes(self, message: kvstore_pb2.StoreEvents) -> Iterator[Change]:
        for key, tier in zip(iter_keys(message.added_keys), message.added_tiers, strict=True):
            is_new = key not in self._there
            self._there.add(key)
            yield Change("added" if is_new else "moved", key, _TIERS.get(tier, "?"))  # type: ignore[call-overload]
        for key in iter_keys(message.removed_keys):
            self._there.discard(key)
            yield Change("removed", key)
        for key in iter_keys(message.read_keys):
            yield Change("read", key)


SHOW_EVERY_S = 1.0
RETRY_S = 1.0
_FIELDS = ("added", "moved", "removed", "read")


def add_to(verbs: objects.Verbs, common: ArgumentParser) -> None:
    help = "follow what is added, moved between tiers, removed and read, until Ctrl-C"
    parser = objects.add(verbs, "watch", run, common, help)
    parser.add_argument("--keys", action="store_true", help="print every event with its key")
    parser.set_defaults(interrupted=EXIT_OK)


async def run(arguments: Namespace, cluster: Cluster, output: Output) -> int:
    watch = _Watch(cluster, output, with_keys=arguments.keys)
    first = await cluster.nodes()  # raises where nothing can be watched
    # So does a wrong token, of which a registry may know nothing. Who is lost may come back.
    await cluster.stats(first)
    async with running(watch.show()) as showing, running(watch.follow(first)) as following:
        done, _ = await asyncio.wait({showing, following}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    return EXIT_OK


class _Watched:
    """One node, as it is heard. Events are counted by `Change.what`."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.task: asyncio.Task[None] | None = None
        self.state = "connecting"
        self.objects = Objects()
        self.fresh = Counter[str]()  # since they were shown last
        self.shown = Counter[str]()  # what was shown last
        self.total = Counter[str]()

    def turn(self) -> Counter[str]:
        """What came since the last turn."""
        self.shown, self.fresh = self.fresh, Counter()
        self.total += self.shown
        return self.shown


class _Watch:
    """The nodes that are followed."""

    def __init__(self, cluster: Cluster, output: Output, *, with_keys: bool) -> None:
        self._cluster = cluster
        self._output = output
        self._with_keys = with_keys
        self._watched: dict[str, _Watched] = {}
        self._members: set[str] = set()  # as the registry said last
        self._is_live = output.is_terminal and not output.as_json and not with_keys

    async def follow(self, first: Sequence[Node]) -> None:
        """For ever; ends every task that it began."""
        try:
            for node in first:
                self._begin(node)
            await self._follow_members({node.name for node in first})
        finally:
            for watched in list(self._watched.values()):
                self._end(watched)

    async def _follow_members(self, chosen: set[str]) -> None:
        registry = self._cluster.registry
        if registry is None:
            await asyncio.Event().wait()
            return
        async for members in registry.watch():
            self._settle([m for m in members if m.role == STORE_ROLE and self._wants(m, chosen)])

    def _wants(self, member: Member, chosen: set[str]) -> bool:
        return not self._cluster.is_limited or member.instance_id in chosen

    def _settle(self, members: Sequence[Member]) -> None:
        """Follows exactly these from now on; one that has come back elsewhere is another."""
        now = {member.instance_id: self._cluster.node_of(member) for member in members}
        for name, watched in list(self._watched.items()):
            if name not in now and name in self._members:  # one that was dialled may be no member
                self._say(watched.node, "left")
                self._end(watched)
            elif (
                name in now and now[name].endpoint.rpc_address != watched.node.endpoint.rpc_address
            ):
                self._end(watched)
        self._members = set(now)
        for name, node in now.items():
            if name not in self._watched:
                self._begin(node)

    def _begin(self, node: Node) -> None:
        watched = self._watched[node.name] = _Watched(node)
        watched.task = asyncio.create_task(self._listen(watched))

    def _end(self, watched: _Watched) -> None:
        del self._watched[watched.node.name]
        if watched.task is not None:
            watched.task.cancel()

    async def _listen(self, watched: _Watched) -> None:
        while True:
            try:
                await self._hear(watched)
            except MoonserveError as error:
                if watched.state != "lost":
                    why = error.why if isinstance(error, Unreachable) else reason(error)
                    self._say(watched.node, f"lost: {why}")
                watched.state = "lost"
            await asyncio.sleep(RETRY_S)

    async def _hear(self, watched: _Watched) -> None:
        """Until the node is lost."""
        request = kvstore_pb2.StoreSubscribeRequest()
        stream = self._cluster.stream(watched.node, watched.node.stub.Subscribe, request)
        async for message in stream:
            for change in watched.objects.apply(message):
                watched.fresh[change.what] += 1
                self._print(watched.node, change)
            if watched.state != "watched":
                back = "back" if watched.state == "lost" else "watched"
                self._say(watched.node, f"{back}, {len(watched.objects):,} objects")
                watched.state = "watched"

    # ---- what is printed

    def _print(self, node: Node, change: Change) -> None:
        if self._with_keys:
            fields = {"event": change.what, "key": change.key.hex()}
            self._output.record(time=_iso(), node=node.name, **fields, tier=change.tier)
            tier = f"  {change.tier}" if change.tier else ""
            self._line(node, f"{change.what:8} {self._output.key(change.key)}{tier}")

    def _say(self, node: Node, what: str) -> None:
        self._output.record(time=_iso(), node=node.name, event=what)
        if not self._is_live:
            self._line(node, what)

    async def show(self) -> None:
        """What happened, once a second."""
        console = Console(file=self._output.stdout, highlight=False)
        live = Live(console=console, auto_refresh=False) if self._is_live else None
        with live or nullcontext():
            while True:
                for watched in self._watched.values():
                    counts = watched.turn()
                    if counts and not self._with_keys and live is None:
                        self._tell(watched.node, counts)
                if live is not None:
                    live.update(table(list(self._watched.values())), refresh=True)
                await asyncio.sleep(SHOW_EVERY_S)

    def _tell(self, node: Node, counts: Counter[str]) -> None:
        numbers = {name: counts[name] for name in _FIELDS}
        self._output.record(time=_iso(), node=node.name, event="counts", **numbers)
        texts = [f"{name} {number:,}" for name, number in numbers.items() if number]
        self._line(node, ", ".join(texts))

    def _line(self, node: Node, text: str) -> None:
        self._output.line(f"{datetime.now():%H:%M:%S}  {node.name:12}  {text}")


def table(watched: Sequence[_Watched]) -> Table:
    """Events of the last second, with their totals since the watch began."""
    shown = grid("node", "state", ">objects", *(f">{name}/s (all)" for name in _FIELDS))
    for one in sorted(watched, key=lambda one: one.node.name):
        rates = (f"{one.shown[name]:,} ({one.total[name]:,})" for name in _FIELDS)
        style = "red" if one.state == "lost" else None
        shown.add_row(one.node.name, one.state, f"{len(one.objects):,}", *rates, style=style)
    return shown


def _iso() -> str:
    return datetime.now().astimezone().isoformat(timespec="milliseconds")
