"""Secrets that were planted are found nowhere, and nothing listens beyond loopback unless it is told to."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from tests.e2e.cluster import Cluster, running_cluster
from tests.patience import PATIENCE_S
from tests.random_models import make_model
from tests.redis_server import RedisServer

pytestmark = pytest.mark.e2e

API_KEY = "sk-planted-api-key-c1a7"
TENANT_KEY = "sk-planted-tenant-key-5e0b"
REDIS_PASSWORD = "planted-redis-password-77d2"
WRONG_KEY = "sk-planted-wrong-key-0a9f"


@dataclass(frozen=True)
class Site:
    cluster: Cluster
    traces: Path
    redis: RedisServer

    @property
    def secrets(self) -> dict[str, str]:
        return {
            "cluster token": self.cluster.token,
            "API key": API_KEY,
            "tenant's key": TENANT_KEY,
            "registry password": REDIS_PASSWORD,
            "a stranger's key": WRONG_KEY,
        }

    def processes(self) -> list[psutil.Process]:
        """The launcher and all that it has started."""
        launcher = psutil.Process(self.cluster.process.pid)
        return [launcher, *launcher.children(recursive=True)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    pytest.importorskip("opentelemetry.sdk", reason="needs moonserve[tracing]")
    folder = tmp_path_factory.mktemp("secrets")
    make_model("llama", folder / "model")
    flags = ("--trace-dir", str(folder / "traces"), "--log-level", "debug", "--dtype", "float32")
    with RedisServer("--requirepass", REDIS_PASSWORD) as redis:
        environ = {
            "MOONSERVE_API_KEY": API_KEY,
            "MOONSERVE_TENANT_KEYS": f"acme={TENANT_KEY}",
            "MOONSERVE_REGISTRY": f"redis://:{REDIS_PASSWORD}@{redis.address}",
        }
        logs = folder / "logs"
        with running_cluster(folder / "model", logs, *flags, environ=environ) as cluster:
            cluster.headers["Authorization"] = f"Bearer {API_KEY}"
            yield Site(cluster, folder / "traces", redis)


def test_every_socket_of_a_cluster_listens_on_loopback_only(site: Site) -> None:
    """As the kernel lists them (/proc/net/tcp, tcp6, udp, udp6)."""
    listening = [
        (process.name(), connection.laddr)
        for process in site.processes()
        for connection in process.net_connections(kind="inet")
        if not connection.raddr
    ]
    ports = {address.port for _, address in listening}
    assert site.cluster.port in ports
    assert len(ports) >= 8, "conductor, gateway, and several of each worker and store"
    assert not [each for each in listening if not _is_loopback(each[1].ip)]


def test_planted_secrets_are_nowhere_to_be_found(site: Site) -> None:
    shown = _provoked(site)
    files = [*site.cluster.log_dir.rglob("*"), *site.traces.rglob("*")]
    shown |= {str(path): path.read_text(errors="replace") for path in files if path.is_file()}
    shown |= {f"ps of {process.pid}": _command_line(process) for process in site.processes()}
    shown["the launcher's output"] = site.cluster.output
    assert len([name for name in shown if name.endswith(".log")]) >= 5
    assert any(name.startswith(str(site.traces)) for name in shown)
    found = [
        (secret, name)
        for secret, value in site.secrets.items()
        for name, text in shown.items()
        if value in text
    ]
    assert not found


def _provoked(site: Site) -> dict[str, str]:
    """What the endpoint says to right and to wrong requests, of its own keys and of strangers', Redis gone or not."""
    cluster = site.cluster
    shown: dict[str, str] = {}
    for key in (API_KEY, TENANT_KEY, WRONG_KEY):
        with httpx.Client(
            base_url=cluster.url,
            timeout=PATIENCE_S,
            headers={"Authorization": f"Bearer {key}"},
        ) as client:
            body = {"prompt": [1, 2, 3], "max_tokens": 2}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == (401 if key == WRONG_KEY else 200), answer.text
            request_id = answer.headers["x-request-id"]
            shown[f"answer to {key[:15]}"] = answer.text + str(answer.headers)
            shown[f"refusal of {key[:15]}"] = client.post("/v1/completions", json={"n": {}}).text
            paths = (
                "/metrics",
                "/v1/cluster",
                f"/v1/requests/{request_id}/explain",
                "/version",
                "/ready",
            )
            shown |= {f"{path} for {key[:15]}": client.get(path).text for path in paths}
    site.redis.kill()
    with cluster.client() as client, suppress(httpx.HTTPError):
        shown["without Redis"] = client.post("/v1/completions", json={"prompt": [1]}).text
    cluster.wait_for("somebody misses Redis", lambda: "edis" in cluster.logs())
    site.redis.start()
    cluster.wait_for("it serves again", cluster.is_ready)
    return shown


def _is_loopback(text: str) -> bool:
    """IPv4 within IPv6, as gRPC binds it, too."""
    ip = ipaddress.ip_address(text)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def _command_line(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
