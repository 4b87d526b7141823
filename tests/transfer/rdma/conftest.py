"""Engines whose rdma transport runs on devices in this process's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.transfer.conftest import TOKEN
from tests.transfer.rdma.fake_fabric import FakeFabric, Wire
from transfer import TransferEngine, TransferOptions, registry
from transfer.rdma.transport import RdmaTransport


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def fabrics() -> list[FakeFabric]:
    """Of all engines, in the order of their making."""
    return []


@pytest.fixture
def transport() -> str:
    return "rdma"


@pytest.fixture(autouse=True)
def rdma_in_memory(
    wire: Wire, fabrics: list[FakeFabric], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Every engine of the test; nothing of it is left behind."""

    def make_fabric() -> FakeFabric:
        fabrics.append(FakeFabric(wire))
        return fabrics[-1]

    makers = {"rdma": lambda: RdmaTransport(make_fabric)}
    monkeypatch.setattr(registry, "_TRANSPORTS", {**registry._TRANSPORTS, **makers})
    yield
    assert not wire.regions
    assert not wire.pairs
    assert all(device.is_closed for fabric in fabrics for device in fabric.devices)


@pytest.fixture
def make_engine(rdma_in_memory: None) -> Iterator[Callable[..., TransferEngine]]:
    engines: list[TransferEngine] = []

    def make(token: str = TOKEN, **options: Any) -> TransferEngine:
        faults = options.pop("faults", None)
        chosen = TransferOptions(transports=("rdma",), **options)
        engine = TransferEngine(cluster_token=token, faults=faults, options=chosen)
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
