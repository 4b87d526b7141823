"""Metrics of all processes on one page, scraped over RPC. A process's name is the label `process` of its samples.

`merge_pages` is pure. `ClusterMetrics` scrapes; concurrent requests share one result. A process that does not answer is
missing from the page, except for `moonserve_up`, which is 0 for it.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from moonserve.gateway.cluster.cluster_client import ClusterClient
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.pb import metrics_pb2, metrics_pb2_grpc
from moonserve.protocol.process.machine import host_identity
from moonserve.protocol.process.metrics import LoopCollector
from moonserve.protocol.rpc.grpc_transport import Channels

_TIMEOUT_S = 2.0
_RAIL_FIELDS = metrics_pb2.Rail.DESCRIPTOR.fields
_SAMPLE = re.compile(r"(?P<name>[^\s{]+)(?:\{(?P<labels>.*)\})?(?P<rest> .+)", re.DOTALL)
_UP_HEADER = "# HELP moonserve_up 1 = the process returned its metrics.\n# TYPE moonserve_up gauge\n"


def merge_pages(pages: Mapping[str, str]) -> str:
    """Merges pages of several processes, by name, into one page in Prometheus' text format. A family's samples stand
    together under one header, as the format demands; if versions word a header differently, the first one is used."""
    headers: dict[str, dict[str, str]] = {}  # family → kind (HELP, TYPE) → line
    samples: dict[str, list[str]] = {}
    for process, page in pages.items():
        label, family = f'process="{_escaped(process)}"', ""
        for line in page.split("\n"):  # not splitlines: labels may contain other line separators
            if line.startswith("# "):
                _, kind, family, *_ = line.split(" ", 3)
                headers.setdefault(family, {}).setdefault(kind, line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, label))
    families = ((*headers[family].values(), *lines) for family, lines in samples.items())
    return "".join(f"{line}\n" for lines in families for line in lines)


def _labelled(sample: str, label: str) -> str:
    found = _SAMPLE.fullmatch(sample)
    assert found is not None, "a sample is a name, maybe labels, and a value"
    labels = f"{label},{found['labels']}" if found["labels"] else label
    return f"{found['name']}{{{labels}}}{found['rest']}"


def _escaped(value: str) -> str:
    """Escapes a string for use as a label value."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def phase_collector(phases: Callable[[], Mapping[str, int]]) -> LoopCollector:
    """Returns a collector of the number of requests per phase, counted at each scrape."""

    def collect() -> Iterator[Metric]:
        family = GaugeMetricFamily("moonserve_requests", "Choices in flight by phase.", labels=("phase",))
        for phase, count in phases().items():
            family.add_metric((phase,), count)
        yield family

    return LoopCollector(collect)


@dataclass(slots=True, eq=False)
class ClusterMetrics:
    """Scrapes all processes of a cluster. Used in one event loop."""

    instance_id: str
    registry: CollectorRegistry
    cluster: ClusterClient
    channels: Channels
    conductors: Sequence[str]  # their addresses; addresses of other processes are in the cluster's view
    _host: str = field(default_factory=host_identity, init=False)
    _gathering: asyncio.Task[str] | None = field(default=None, init=False)

    async def page(self) -> str:
        """Returns the metrics of every process that answers within 2 s, including this one."""
        if self._gathering is None or self._gathering.done():
            self._gathering = asyncio.create_task(self._gather(), name="gather metrics")
        return await asyncio.shield(self._gathering)

    async def _gather(self) -> str:
        named = self._addresses()
        replies = await asyncio.gather(*(self._ask(each, "Scrape", metrics_pb2.ScrapeRequest()) for each in named))
        pages = {self.instance_id: generate_latest(self.registry).decode()}
        pages |= {reply.instance_id: reply.text.decode() for reply in replies if reply is not None}
        silent = [name for name, reply in zip(named.values(), replies, strict=True) if reply is None]
        up = [f'moonserve_up{{process="{_escaped(name)}"}} 1' for name in pages]
        up += [f'moonserve_up{{process="{_escaped(name)}"}} 0' for name in silent]
        return merge_pages(pages) + _UP_HEADER + "\n".join(up) + "\n"

    async def rails(self) -> list[dict[str, Any]]:
        """Returns what each instance has moved over each of its rails since its start, sorted by instance id. Instances
        that do not answer are missing."""
        view = self.cluster.view
        addresses = [each.endpoint.rpc_address for each in view.instances] if view else []
        replies = await asyncio.gather(*(self._ask(each, "Rails", metrics_pb2.RailsRequest()) for each in addresses))
        return [
            {"process": reply.instance_id, **{f.name: getattr(rail, f.name) for f in _RAIL_FIELDS}}
            for reply in sorted(filter(None, replies), key=lambda reply: reply.instance_id)
            for rail in reply.rails
        ]

    def _addresses(self) -> dict[str, str]:
        """Returns the addresses to scrape, with a name to use for processes that do not answer."""
        named = {address: f"conductor@{address}" for address in self.conductors}
        view = self.cluster.view
        for instance in view.instances if view is not None else ():
            named[instance.endpoint.rpc_address] = instance.endpoint.instance_id
        for gateway in view.gateways if view is not None else ():
            is_here = gateway.rpc_address and gateway.host == self._host
            if is_here and gateway.instance_id != self.instance_id:
                named[gateway.rpc_address] = gateway.instance_id
        return named

    async def _ask(self, address: str, method: str, request: Any) -> Any:
        """Returns the reply, or None if there is none within the timeout."""
        stub = metrics_pb2_grpc.MetricsStub(self.channels.to(address))
        try:
            return await self.channels.call(getattr(stub, method), request, timeout_s=_TIMEOUT_S)
        except MoonserveError:
            return None
