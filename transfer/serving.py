"""The transfer engine of a process that serves, with its metrics, from start to stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from prometheus_client import CollectorRegistry

from protocol.metrics import exposed
from protocol.scraping import process_registry
from transfer.engine import TransferEngine
from transfer.faults import FaultPlan
from transfer.metrics import TransferCollector
from transfer.options import TransferOptions


class ServingConfig(Protocol):
    """What a process of the cluster is told that has a transfer engine."""

    @property
    def cluster_token(self) -> str: ...
    @property
    def instance_id(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def metrics_port(self) -> int: ...

    def transfer_options(self, host: str) -> TransferOptions: ...


@contextmanager
def serving(
    config: ServingConfig, faults: FaultPlan | None = None
) -> Iterator[tuple[TransferEngine, CollectorRegistry]]:
    """A started engine, and where the process's metrics go, which are exposed meanwhile. Raises ConfigError."""
    engine = TransferEngine(
        cluster_token=config.cluster_token,
        name=config.instance_id,
        options=config.transfer_options(config.host),
        faults=faults,
    )
    registry = process_registry()
    registry.register(TransferCollector(engine))
    with engine, exposed(registry, config.host, config.metrics_port):
        yield engine, registry
