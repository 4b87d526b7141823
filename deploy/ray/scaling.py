"""What the autoscaler decides, carried over to what is wanted. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conductor.roles.controller import WorkerLoad
from deploy.ray.autoscaler import Autoscaler, Bounds, Grow
from deploy.ray.config import ClusterConfig
from deploy.ray.process import Process
from deploy.ray.units import Kind
from deploy.ray.wanted import Wanted
from protocol.ids import Role


class Scaling:
    """Of a cluster that wants it; of another one it does nothing."""

    def __init__(self, config: ClusterConfig) -> None:
        self._autoscaler: Autoscaler | None = None
        if config.autoscale is not None:
            bounds = {
                Role.PREFILL: Bounds(least=config.prefill.min, most=config.prefill.most),
                Role.DECODE: Bounds(least=config.decode.min, most=config.decode.most),
            }
            self._autoscaler = Autoscaler(config.autoscale, bounds)

    def follow(
        self,
        loads: Sequence[WorkerLoad],
        wanted: Wanted,
        processes: Mapping[str, Process],
        now: float,
    ) -> None:
        """Changes `wanted` where that is due."""
        if self._autoscaler is None:
            return
        change = self._autoscaler.decide(loads, wanted.num_workers, now)
        if isinstance(change, Grow):
            wanted.add(Kind(change.role.value))
        elif change is not None and change.instance_id in processes:
            unit = processes[change.instance_id].unit
            if wanted.counts()[unit.kind] > 1:  # of its kind; its role may be another one now
                wanted.dismiss(unit)

    def validate(self) -> None:
        if self._autoscaler is not None:
            self._autoscaler.validate()
