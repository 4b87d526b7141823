"""Starts the servers of each store on loopback; returns the facts that their client needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.store.processes import (
    Child,
    Group,
    python,
    ready,
    start_reporting,
    until_listening,
)
from benchmarks.transfer.pair import ContestantError
from deploy.ports import free_port

TOKEN = "bench-store"
PEERS = Path(".venv-bench/bin")
SEGMENT_BYTES = 1 << 30

Facts = dict[str, Any]
Start = Callable[[Group, set[int], dict[str, Any]], Facts]


def none(group: Group, cores: set[int], options: dict[str, Any]) -> Facts:
    return {}


def node(group: Group, cores: set[int], options: dict[str, Any]) -> Facts:
    """Starts one node of this project's store."""
    flags = ["--dram", str(SEGMENT_BYTES), "--transports", options["transport"]]
    flags += options.get("node_flags", ())
    _, facts = store_node(group, cores, "node", *flags)
    return {"url": f"node://{facts['rpc']}", "token": TOKEN}


def store_node(group: Group, cores: set[int], name: str, *flags: str) -> tuple[Child, Facts]:
    """Starts a node with the given flags and waits until it is ready; `facts["rpc"]` is its address."""
    child, reports = launched_node(group, cores, name, *flags)
    return child, ready(child, reports)


def launched_node(group: Group, cores: set[int], name: str, *flags: str) -> tuple[Child, int]:
    """Starts a node without waiting for it (see `processes.ready`)."""
    return launched(group, cores, "store", name, *flags)


def launched(group: Group, cores: set[int], verb: str, name: str, *flags: str) -> tuple[Child, int]:
    """Starts one of this project's processes; returns it and the descriptor of its status reports."""
    command = python("moonserve", verb, "--instance-id", name, "--log-level", "warning", *flags)
    environment = {"MOONSERVE_CLUSTER_TOKEN": TOKEN}
    return start_reporting(
        lambda line, fds: group.start(name, line, cores=cores, pass_fds=fds, environment=environment),
        [*command, "--status-fd"],
    )


def redis(group: Group, cores: set[int], options: dict[str, Any]) -> Facts:
    binary = shutil.which("redis-server")
    if binary is None:
        raise ContestantError("redis-server is not installed")
    port = free_port()
    here = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(group.folder)]
    memory_only = ["--save", "", "--appendonly", "no"]
    child = group.start("redis", [binary, *here, *memory_only], cores=cores)
    until_listening(child, port)
    return {"port": port}


def mooncake(group: Group, cores: set[int], options: dict[str, Any]) -> Facts:
    """Starts a master and, unless the client holds the segment itself, the process that does."""
    master = _master(group, cores)
    if options["path"] == "tcp":
        command = python(
            "benchmarks.store.peers.mooncake",
            master,
            str(SEGMENT_BYTES),
            interpreter=PEERS / "python",
        )
        start = partial(_start, group, cores, "segment")
        ready(*start_reporting(start, command))
    if options["path"] == "shm":
        return {"master": master, "client": _real_client(group, cores, master)}
    return {"master": master}


def _master(group: Group, cores: set[int]) -> str:
    port = free_port()
    flags = ["--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1"]
    flags += [f"--metrics_port={free_port()}", "--rpc_thread_num=2"]
    child = group.start("master", [str(PEERS / "mooncake_master"), *flags], cores=cores)
    until_listening(child, port)
    return f"127.0.0.1:{port}"


def _real_client(group: Group, cores: set[int], master: str) -> str:
    """Starts the process that shares its segment's memory with the clients of this host."""
    port = free_port()
    flags = [
        "--host=127.0.0.1",
        f"--port={port}",
        "--protocol=tcp",
        "--metadata_server=P2PHANDSHAKE",
    ]
    flags += [
        f"--master_server_address={master}",
        f"--global_segment_size={SEGMENT_BYTES >> 20} MB",
    ]
    child = group.start("real-client", [str(PEERS / "mooncake_client"), *flags], cores=cores)
    until_listening(child, port)
    return f"127.0.0.1:{port}"


def _start(group: Group, cores: set[int], name: str, command: Any, fds: Any) -> Child:
    return group.start(name, command, cores=cores, pass_fds=fds)
