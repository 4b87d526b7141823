"""The list of measured stores, each with a function that starts its servers and a client."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.store import servers
from benchmarks.store.servers import Start
from benchmarks.store.speed.workload import OPS, Load

OURS = "benchmarks.store.speed.moonserve:"
MEMCPY = "benchmarks.store.speed.memcpy:Client"
MOONCAKE = "benchmarks.store.speed.mooncake:Client"
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""redis-py creates new `bytes` for each value. Without these settings, each one maps and unmaps memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    name: str
    group: str
    """"moonserve", "limit" or "peer"."""
    client: str
    """module:Class"""
    servers: Start = servers.none
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    in_peers_environment: bool = False
    ops: Sequence[str] = (*OPS, "exists")

    def can(self, load: Load) -> bool:
        return load.op in self.ops


def _moonserve(name: str, transport: str, *node_flags: str, verify: bool) -> Contestant:
    return Contestant(
        name=f"moonserve {name}",
        group="moonserve",
        client=OURS + "Client",
        servers=servers.node,
        options={"transport": transport, "verify": verify, "node_flags": node_flags},
    )


def _mooncake(name: str, path: str, **environment: str) -> Contestant:
    return Contestant(
        name=f"mooncake {name}",
        group="peer",
        client=MOONCAKE,
        servers=servers.mooncake,
        options={"path": path, "segment_bytes": servers.SEGMENT_BYTES},
        environment={"MC_LOG_LEVEL": "ERROR", "MC_STORE_MEMCPY": "1", **environment},
        in_peers_environment=True,
    )


IN_PLACE = Contestant(
    name="moonserve in place",
    group="moonserve",
    client=OURS + "InPlace",
    servers=servers.node,
    options={"transport": "shm"},
    ops=("get",),
)
CONTESTANTS = (
    IN_PLACE,
    _moonserve("same host", "shm", verify=True),
    _moonserve("same host, unchecked", "shm", verify=False),
    _moonserve("tcp", "tcp", verify=True),
    _moonserve("tcp, values' checksums only", "tcp", "--no-transfer-checksums", verify=True),
    Contestant(name="memcpy", group="limit", client=MEMCPY, options={"shared": True}, ops=OPS),
    Contestant(name="memcpy huge pages", group="limit", client=MEMCPY, options={"shared": False}, ops=OPS),
    _mooncake("tcp", "tcp"),
    _mooncake("tcp, 4 lanes", "tcp", MC_TCP_LANES_PER_PEER="4"),
    _mooncake("same host", "shm"),
    _mooncake("in the client", "inside"),
    Contestant(
        name="redis",
        group="peer",
        client="benchmarks.store.speed.redis:Client",
        servers=servers.redis,
        environment=KEEP_MEMORY,
        in_peers_environment=True,
    ),
)
