"""Planted secrets appear nowhere, sockets listen on loopback unless configured otherwise, and no tier leaks one
tenant's data to another. `benchmarks.serving.tenant_isolation` checks that timing does not leak it either."""

import ipaddress
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from moonserve.gateway.access.tenant_isolation import salt_of
from moonserve.protocol.kv_blocks import BlockKey
from tests.e2e.cluster import Cluster, cached_of, prompt_of, running_cluster
from tests.patience import PATIENCE_S
from tests.random_models import make_model
from tests.redis_server import RedisServer

API_KEY = "sk-planted-api-key-c1a7"
TENANT_KEYS = {"alice": "sk-planted-tenant-key-5e0b", "bob": "sk-planted-tenant-key-71f3=="}
REDIS_PASSWORD = "planted-redis-password-77d2"
WRONG_KEY = "sk-planted-wrong-key-0a9f"
BLOCK_SIZE = 16
NUM_BLOCKS = 5
HITS = "vllm:prefix_cache_hits_total"
PROMPT = prompt_of("isolation", NUM_BLOCKS * BLOCK_SIZE + 3)


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
            **TENANT_KEYS,
            "registry password": REDIS_PASSWORD,
            "a stranger's key": WRONG_KEY,
        }

    def processes(self) -> list[psutil.Process]:
        """Returns the launcher and all processes that it has started."""
        launcher = psutil.Process(self.cluster.process.pid)
        return [launcher, *launcher.children(recursive=True)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    pytest.importorskip("opentelemetry.sdk", reason="needs moonserve[tracing]")
    folder = tmp_path_factory.mktemp("secrets")
    make_model("llama", folder / "model")
    flags = (
        *("--trace-dir", str(folder / "traces"), "--log-level", "debug", "--dtype", "float32"),
        *("--block-size", str(BLOCK_SIZE), "--store-reads", "always", "--tenant-weights", "bob=2"),
    )
    with RedisServer("--requirepass", REDIS_PASSWORD) as redis:
        environ = {
            "MOONSERVE_API_KEY": API_KEY,
            "MOONSERVE_TENANT_KEYS": ",".join(f"{t}={key}" for t, key in TENANT_KEYS.items()),
            "MOONSERVE_REGISTRY": f"redis://:{REDIS_PASSWORD}@{redis.address}",
        }
        logs = folder / "logs"
        with running_cluster(folder / "model", logs, *flags, environ=environ) as cluster:
            cluster.headers["Authorization"] = f"Bearer {API_KEY}"
            yield Site(cluster, folder / "traces", redis)


def test_every_socket_of_a_cluster_listens_on_loopback_only(site: Site) -> None:
    """Checks all sockets that the kernel lists (/proc/net/tcp, tcp6, udp, udp6)."""
    listening = [
        (process.name(), connection.laddr)
        for process in site.processes()
        for connection in process.net_connections(kind="inet")
        if not connection.raddr
    ]
    ports = {address.port for _, address in listening}
    assert site.cluster.port in ports
    assert len(ports) >= 8, "conductor, gateway, and several of each worker and store"
    for name, address in listening:
        ip = ipaddress.ip_address(address.ip)
        assert (getattr(ip, "ipv4_mapped", None) or ip).is_loopback, name  # gRPC binds IPv4 mapped into IPv6


def ask(cluster: Cluster, key: str, **body: Any) -> dict[str, Any]:
    with cluster.client() as client:
        wish = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, **body}
        reply = client.post("/v1/completions", json=wish, headers={"authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    return reply.json()


def found_anywhere(decision: dict[str, Any]) -> dict[str, int]:
    """Returns the numbers of the prompt's blocks in each of the conductor's tables."""
    candidates = decision["prefill_candidates"]
    named = ("device_blocks", "prefix_blocks", "reuse_blocks")
    most = {name: max(each[name] for each in candidates) for name in named}
    return {**most, "best_blocks": decision["best_blocks"], "sources": len(decision["sources"])}


def test_no_tier_index_or_metric_shares_a_block_between_tenants_or_salts(site: Site) -> None:
    """Each of four clients misses first, whoever asked before, and then hits its own blocks. Each tier is compared with
    the exact keys that each tenant's blocks must have."""
    cluster = site.cluster
    askers: list[tuple[str, dict[str, str]]] = [("alice", {}), ("bob", {})]
    askers += [("bob", {"cache_salt": "s"}), ("", {"cache_salt": "s"})]
    seen: set[BlockKey] = set()
    for nth, (tenant, body) in enumerate(askers, 1):
        key = TENANT_KEYS.get(tenant, API_KEY)
        own = cluster.keys_of(PROMPT, BLOCK_SIZE, salt_of(tenant, body.get("cache_salt")))
        assert not seen & set(own)
        seen |= set(own)
        hits = cluster.metric(HITS)
        counted = cluster.counter("prefill-0", "store_hit_blocks")
        first = ask(cluster, key, **body)
        assert cached_of(first) == 0
        [decision] = cluster.decisions(first["id"])
        assert set(found_anywhere(decision).values()) == {0}
        # The key determines the tenant.
        assert decision["turn"]["tenant"] == tenant
        assert decision["turn"]["weight"] == (2.0 if tenant == "bob" else 1.0)
        assert cluster.metric(HITS) == hits
        assert cluster.counter("prefill-0", "store_hit_blocks") == counted

        blocks = nth * NUM_BLOCKS
        cluster.wait_for("the store", lambda n=blocks: cluster.store().num_objects >= n)
        cluster.wait_for("the index", lambda n=blocks: cluster.num_indexed() >= n)
        assert cluster.store().num_objects == blocks  # no block of another tenant was reused
        again = ask(cluster, key, **body)
        assert cached_of(again) == NUM_BLOCKS * BLOCK_SIZE
        [decision] = cluster.decisions(again["id"])
        assert found_anywhere(decision)["best_blocks"] == NUM_BLOCKS
        own_hits = hits + NUM_BLOCKS * BLOCK_SIZE
        cluster.wait_for("its count", lambda n=own_hits: cluster.metric(HITS) == n)
    assert len(cluster.places(sorted(seen))) == len(askers) * NUM_BLOCKS
    cluster.wait_until_all_is_free()


def test_planted_secrets_appear_nowhere(site: Site) -> None:
    shown = _provoked(site)
    files = [*site.cluster.log_dir.rglob("*"), *site.traces.rglob("*")]
    shown |= {str(path): path.read_text(errors="replace") for path in files if path.is_file()}
    shown |= {f"ps of {process.pid}": " ".join(process.cmdline()) for process in site.processes()}
    shown["the launcher's output"] = site.cluster.output
    assert len([name for name in shown if name.endswith(".log")]) >= 5
    assert any(name.startswith(str(site.traces)) for name in shown)
    found = [(secret, name) for secret, value in site.secrets.items() for name, text in shown.items() if value in text]
    assert not found


def _provoked(site: Site) -> dict[str, str]:
    """Returns replies to valid and invalid requests, with known and unknown keys, with and without Redis."""
    cluster = site.cluster
    shown: dict[str, str] = {}
    for key in (API_KEY, *TENANT_KEYS.values(), WRONG_KEY):
        with httpx.Client(
            base_url=cluster.url, timeout=PATIENCE_S, headers={"Authorization": f"Bearer {key}"}
        ) as client:
            body = {"prompt": [1, 2, 3], "max_tokens": 2}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == (401 if key == WRONG_KEY else 200), answer.text
            request_id = answer.headers["x-request-id"]
            shown[f"answer to {key[-4:]}"] = answer.text + str(answer.headers)
            shown[f"refusal of {key[-4:]}"] = client.post("/v1/completions", json={"n": {}}).text
            paths = ("/metrics", "/v1/cluster", f"/v1/requests/{request_id}/explain", "/version", "/ready")
            shown |= {f"{path} for {key[-4:]}": client.get(path).text for path in paths}
    site.redis.kill()
    with cluster.client() as client, suppress(httpx.HTTPError):
        shown["without Redis"] = client.post("/v1/completions", json={"prompt": [1]}).text
    cluster.wait_for("somebody misses Redis", lambda: "edis" in cluster.logs())
    site.redis.start()
    cluster.wait_for("it serves again", cluster.is_ready)
    return shown
