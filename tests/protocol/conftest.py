"""Fixtures: certificates of a test cluster, and long handshake timeouts."""

import pytest

from moonserve.protocol.process.tls import Certificates, load_certificates
from tests.authority import Authority
from tests.patience import PATIENCE_S


@pytest.fixture(scope="session")
def tls(authority: Authority) -> Certificates:
    return load_certificates(authority.sign("member", names="IP:127.0.0.1").tls)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the handshake timeouts, because handshakes are slow on a busy machine."""
    for module in ("socket_server", "socket_server_connection"):
        monkeypatch.setattr(f"moonserve.protocol.rpc.{module}.HANDSHAKE_S", PATIENCE_S)
