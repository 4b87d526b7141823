"""One cluster of two nodes for the tests that break nothing; each stores objects of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from protocol.registry.redis_registry import RedisRegistry
from tests.channels import PatientChannels
from tests.deploy.kvctl.stage import Kvctl, Stage, stage
from tests.patience import PATIENCE_S


@pytest.fixture(scope="package", autouse=True)
def _no_cluster_of_the_operator() -> Iterator[None]:
    """The processes under test read the environment, too."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MOONSERVE_REGISTRY")]:
            patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command gives up who does not answer within seconds, and a busy machine may need longer."""
    for caller in ("deploy.kvctl.cluster", "deploy.terminal.client", "protocol.registry.remote"):
        monkeypatch.setattr(f"{caller}.Channels", PatientChannels)
    monkeypatch.setitem(RedisRegistry.__init__.__kwdefaults__, "deadline_s", PATIENCE_S)


@pytest.fixture(scope="package")
def pair() -> Iterator[Stage]:
    with stage(["store-0", "store-1"]) as made:
        yield made


@pytest.fixture
def kvctl(pair: Stage, capsys: pytest.CaptureFixture[str]) -> Kvctl:
    """On `pair`."""
    return Kvctl(capsys, pair.registry)
