"""The decode workers' figures as the gateway's metrics show them: taken from each view of the cluster. Pure."""

from __future__ import annotations

from protocol.ids import Role
from protocol.metrics import RequestMetrics
from protocol.pb import conductor_pb2
from protocol.wire import role_from_wire


class DecodeFigures:
    """Sums over the decode workers of one view; counts survive their restarts."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self._counted: dict[str, tuple[int, int]] = {}  # instance → epoch, preemptions

    def take(self, view: conductor_pb2.ClusterView) -> None:
        """Brings the metrics up to date."""
        workers = [i for i in view.instances if role_from_wire(i.role) is Role.DECODE]
        used = sum(worker.load.held_blocks + worker.load.leased_blocks for worker in workers)
        total = sum(worker.num_blocks for worker in workers)
        self._metrics.kv_usage.set(used / total if total else 0.0)
        for worker in workers:
            self._count(worker)

    def _count(self, worker: conductor_pb2.InstanceView) -> None:
        endpoint, preemptions = worker.endpoint, worker.load.num_preemptions
        epoch, counted = self._counted.get(endpoint.instance_id, (endpoint.epoch, 0))
        if epoch != endpoint.epoch:
            counted = 0  # another process of this name, which counts from the beginning
        self._metrics.preemptions.inc(max(0, preemptions - counted))
        self._counted[endpoint.instance_id] = (endpoint.epoch, preemptions)
