"""List of the contestants of the transfer benchmark."""

from __future__ import annotations

from benchmarks.transfer.contestant import ASYNC_OR_SYNC, Contestant
from benchmarks.transfer.limits import iperf, sockets

OURS = "benchmarks.transfer.moonserve:"
LIMITS = "benchmarks.transfer.limits."
PEERS = "benchmarks.transfer.peers."

MOONSERVE = tuple(
    Contestant(
        name=f"moonserve {transport}{' + checksums' if checksums else ''}",
        group="moonserve",
        module=OURS,
        options={"transport": transport, "checksums": checksums},
        modes=ASYNC_OR_SYNC,
    )
    for transport in ("shm", "tcp")
    for checksums in (False, True)
)
CONTESTANTS = (
    *MOONSERVE,
    Contestant(name="memcpy", group="limit", module=LIMITS + "memory:Copy", options={"huge": False}),
    Contestant(
        name="memcpy huge pages",
        group="limit",
        module=LIMITS + "memory:Copy",
        options={"huge": True},
    ),
    Contestant(name="process_vm_readv", group="limit", module=LIMITS + "memory:Vm"),
    Contestant(name="raw sockets", group="limit", module=LIMITS + "sockets:", modes=sockets.MODES),
    Contestant(
        name="iperf3",
        group="limit",
        module=LIMITS + "iperf:",
        largest_block=iperf.LARGEST_BLOCK,
        scatter=False,
        latency=False,
        verified=False,
    ),
    Contestant(
        name="mooncake tcp",
        group="peer",
        module=PEERS + "mooncake:",
        environment={"MC_LOG_LEVEL": "ERROR"},
        modes=ASYNC_OR_SYNC,
        in_peers_environment=True,
    ),
    Contestant(
        name="nixl tcp",
        group="peer",
        module=PEERS + "nixl:",
        options={"error_handling": "peer"},
        environment={"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"},
        in_peers_environment=True,
    ),
    Contestant(
        name="nixl shm",
        group="peer",
        module=PEERS + "nixl:",
        options={"error_handling": "none"},
        environment={"UCX_TLS": "sm,self"},
        in_peers_environment=True,
    ),
    Contestant(
        name="gloo",
        group="peer",
        module=PEERS + "gloo:",
        environment={"GLOO_SOCKET_IFNAME": "lo"},
    ),
)
