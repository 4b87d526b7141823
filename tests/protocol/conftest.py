"""Fixtures: certificates of a test cluster, and long handshake timeouts."""

from __future__ import annotations

import pytest

from protocol.tls import Certificates, load
from tests.authority import Authority
from tests.patience import PATIENCE_S


@pytest.fixture(scope="session")
def tls(authority: Authority) -> Certificates:
    return load(authority.sign("member", names="IP:127.0.0.1").tls)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the handshake timeouts, because handshakes are slow on a busy machine."""
    for name in ("served.HANDSHAKE_S", "server.HANDSHAKE_S"):
        monkeypatch.setattr(f"protocol.lean.{name}", PATIENCE_S)
