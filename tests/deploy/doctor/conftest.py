"""The doctor gives up what does not answer within seconds, and a busy machine may need longer."""

from __future__ import annotations

import pytest

from deploy.doctor import peer_checks, service_checks, transfer_checks
from protocol.registry.redis_registry import RedisRegistry
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for checks, limit in (
        (peer_checks, "_CONNECT_S"),
        (peer_checks, "_HANDSHAKE_S"),
        (service_checks, "_REGISTRY_S"),
        (transfer_checks, "_DEADLINE_S"),
    ):
        monkeypatch.setattr(checks, limit, PATIENCE_S)
    monkeypatch.setitem(RedisRegistry.__init__.__kwdefaults__, "deadline_s", PATIENCE_S)
