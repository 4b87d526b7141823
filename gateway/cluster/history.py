"""The last hour of one gateway: a point every ten seconds (`History`), and instances that left or restarted
(`InstanceEvents`). Both are pure, bounded, and lost when the gateway ends. `record` fills a history from what the
gateway knows already; its only calls are for the rails, while requests run.

A series has a name and one value per point. A `/` precedes the instance, phase or rail in its name.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from moonserve.gateway.cluster.cluster_client import ClusterClient
from moonserve.gateway.cluster.request_metrics import RecentFigures
from moonserve.protocol.pb import conductor_pb2
from moonserve.protocol.request import Role
from moonserve.protocol.rpc.wire import role_from_wire

INTERVAL_S = 10.0
NUM_POINTS = 360
MAX_SERIES = 1024  # of 12 kB at most; enough for 300 workers
_MAX_EVENTS = 32


class History:
    """Values of the latest 360 points by series. `at`: Unix seconds; `now`: monotonic seconds."""

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=NUM_POINTS)
        self._number = 0  # points since the start
        self._columns: dict[str, deque[float | None]] = {}
        self._totals: dict[str, tuple[float, float]] = {}  # last value of each total, and when

    def add(self, at: float, now: float, levels: Mapping[str, float | None], totals: Mapping[str, float]) -> None:
        """Adds a point. It has the values of `levels`, and the growth per second of `totals` since the last point that
        had them. Series beyond `MAX_SERIES` are ignored."""
        values = {**levels, **dict(self._rates(totals, now))}
        for name in values:
            if name not in self._columns and len(self._columns) < MAX_SERIES:
                self._columns[name] = deque([None] * len(self._at), maxlen=NUM_POINTS)
        self._at.append(round(at, 1))
        self._number += 1
        for name, column in list(self._columns.items()):
            value = values.get(name)
            column.append(None if value is None else float(f"{value:.4g}"))
            if _is_empty(column):
                del self._columns[name]

    def _rates(self, totals: Mapping[str, float], now: float) -> Iterator[tuple[str, float]]:
        for name, value in totals.items():
            before, at = self._totals.get(name, (value, now))
            if now > at and value >= before:  # it is smaller after a restart of its process
                yield name, (value - before) / (now - at)
            self._totals[name] = (value, now)
        oldest = now - NUM_POINTS * INTERVAL_S
        self._totals = {name: entry for name, entry in self._totals.items() if entry[1] > oldest}

    def as_json(self, after: int) -> dict[str, Any]:
        """Returns the points behind number `after`, oldest first, without series that have no value in them."""
        begin = len(self._at) - max(0, min(len(self._at), self._number - after))
        found = {name: list(column)[begin:] for name, column in self._columns.items()}
        series = {name: values for name, values in found.items() if not _is_empty(values)}
        return {"interval_s": INTERVAL_S, "number": self._number, "at": list(self._at)[begin:], "series": series}


def _is_empty(values: Iterable[float | None]) -> bool:
    return all(value is None for value in values)


class InstanceEvents:
    """Instances that left the cluster, restarted or switched their role: the latest 32 events."""

    def __init__(self) -> None:
        self._known: dict[str, conductor_pb2.InstanceView] = {}  # present, or named by an event
        self.latest: deque[dict[str, Any]] = deque(maxlen=_MAX_EVENTS)

    def take(self, view: conductor_pb2.ClusterView, at: float) -> None:
        """Compares a view with the one before. `at`: Unix seconds. An instance that is back has not left."""
        present = {instance.endpoint.instance_id: instance for instance in view.instances}
        gone = {event["instance_id"] for event in self.latest if event["what"] in ("left", "drained")}
        self.latest = deque((e for e in self.latest if e["instance_id"] not in gone & present.keys()), _MAX_EVENTS)
        for name, before in self._known.items():
            seen = present.get(name)
            if seen is None and name not in gone:
                self._add("drained" if before.draining else "left", before, at)
            elif seen is not None and seen.role != before.role:
                self._add("switched", seen, at)
            elif seen is not None and seen.endpoint.epoch != before.endpoint.epoch:
                self._add("restarted", seen, at)
        named = {event["instance_id"] for event in self.latest}
        self._known = {name: instance for name, instance in self._known.items() if name in named} | present

    def _add(self, what: str, instance: conductor_pb2.InstanceView, at: float) -> None:
        name, role = instance.endpoint.instance_id, role_from_wire(instance.role).value
        self.latest.append({"at": at, "what": what, "instance_id": name, "role": role})


async def record(
    history: History,
    figures: RecentFigures,
    phases: Callable[[], Mapping[str, int]],
    cluster: ClusterClient,
    rails: Callable[[], Awaitable[list[dict[str, Any]]]],
) -> None:
    """Adds a point to the history now and every ten seconds until cancelled. `phases`: live requests by phase."""
    num_requests = 0
    while True:
        live, before, num_requests = phases(), num_requests, figures.totals["requests"]
        moved = await rails() if any(live.values()) or num_requests != before else []
        now, view = asyncio.get_running_loop().time(), cluster.view
        instances = view.instances if view is not None else ()
        levels = {**figures.levels(now, INTERVAL_S), **{f"phase/{name}": n for name, n in live.items()}}
        totals = {**figures.sums(), **rail_sums(moved)}
        for instance in instances:
            levels |= instance_levels(instance)
            totals |= step_sums(instance)
        history.add(time.time(), now, levels, totals)
        await asyncio.sleep(INTERVAL_S)


def instance_levels(instance: conductor_pb2.InstanceView) -> dict[str, float]:
    """Returns the queue of an instance and the share of its memory for KV that is in use."""
    name, load = instance.endpoint.instance_id, instance.load
    if role_from_wire(instance.role) is Role.STORE:
        return {f"kv/{name}": 1.0 - load.free_bytes / max(1, load.capacity_bytes)}
    used = (load.held_blocks + load.leased_blocks) / max(1, instance.num_blocks)
    return {f"waiting/{name}": load.num_waiting, f"kv/{name}": used}


def step_sums(instance: conductor_pb2.InstanceView) -> dict[str, float]:
    """Returns the number of decode steps of an instance since its start, and their seconds."""
    name, steps = instance.endpoint.instance_id, instance.load.steps
    return {f"steps/{name}": steps.num_steps, f"step_s/{name}": steps.seconds} if steps.num_steps else {}


def rail_sums(rails: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the bytes moved over each rail by all processes, and the number of failures."""
    sums: dict[str, float] = {}
    for rail in rails:
        name = f"rail/{rail['transport']} {rail['rail']}"
        sums[name] = sums.get(name, 0) + rail["read_bytes"] + rail["written_bytes"]
        sums["rail_failures"] = sums.get("rail_failures", 0) + rail["failures"]
    return sums
