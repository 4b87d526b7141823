"""Starts the servers of each store on loopback; returns the facts that their client needs.

Every process is ended by its id and never outlives the driver. Every wait has a timeout. No process is stopped between
turns, because stores' processes exchange heartbeats; all measured ones are idle without requests (less than 1 % of a
core).
"""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.transfer.contest import ContestantError, pinned_command
from moonserve.deploy.launcher.ports import free_port
from moonserve.protocol.pb import directory_pb2, directory_pb2_grpc, kvstore_pb2, kvstore_pb2_grpc
from moonserve.protocol.process.child_process import NotReady, wait_until_ready
from moonserve.protocol.rpc.grpc_transport import Channels

READY_S = 60.0
STOP_S = 10.0
POLL_S = 0.01


class ChildProcess:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def pid(self) -> int:
        return self.process.pid

    def require_alive(self) -> None:
        """Raises ContestantError with the last log line if the process has ended."""
        if (code := self.process.poll()) is not None:
            raise ContestantError(f"died: {self.last_log_line() or f'exit code {code}'}")

    def last_log_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""

    def stop(self, timeout_s: float) -> float:
        """Ends the process by SIGTERM; returns the seconds taken. Raises ContestantError on timeout."""
        begin = time.monotonic()
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ContestantError(f"did not end within {timeout_s:g} s") from None
        return time.monotonic() - begin

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class ProcessGroup:
    """Processes with a common folder for their logs, ended together."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self._children: list[ChildProcess] = []

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        cores: set[int],
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> ChildProcess:
        log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                pinned_command(command, cores),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=pass_fds,
                env={**self._environment, **(environment or {})},
            )
        self._children.append(ChildProcess(process, log))
        return self._children[-1]

    def close(self) -> None:
        """Sends SIGTERM to all processes, and kills those that do not end in time."""
        for child in self._children:
            child.process.terminate()
        give_up_at = time.monotonic() + STOP_S
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, give_up_at - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for child in self._children:
            child.kill()
        self._children = []


def start_reporting(
    start: Callable[[Sequence[str], Sequence[int]], ChildProcess], command: Sequence[str]
) -> tuple[ChildProcess, int]:
    """Starts a process whose last argument is a descriptor for reports; returns it and the descriptor to read from."""
    read_fd, write_fd = os.pipe()
    try:
        return start([*command, str(write_fd)], [write_fd]), read_fd
    finally:
        os.close(write_fd)


def wait_ready(child: ChildProcess, reports: int, timeout_s: float = READY_S) -> dict[str, str]:
    """Waits until a process serves; returns the facts it reports. Closes `reports`. Raises ContestantError."""
    try:
        return asyncio.run(asyncio.wait_for(wait_until_ready(reports), timeout_s))
    except NotReady as error:
        raise ContestantError(f"{error}: {child.last_log_line()}") from error
    except TimeoutError as error:
        raise ContestantError(f"not ready within {timeout_s:g} s") from error


def wait_listening(child: ChildProcess, port: int, timeout_s: float = READY_S) -> None:
    """Waits until a server without reports listens. Raises ContestantError."""
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        child.require_alive()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(POLL_S)
    raise ContestantError(f"does not listen within {timeout_s:g} s")


def python_command(module: str, *arguments: str, interpreter: Path = Path(sys.executable)) -> list[str]:
    return [str(interpreter), "-m", module, *arguments]


def all_cores() -> set[int]:
    return set(os.sched_getaffinity(0))


TOKEN = "bench-store"
PEERS = Path(".venv-bench/bin")
SEGMENT_BYTES = 1 << 30

Facts = dict[str, Any]
Start = Callable[[ProcessGroup, set[int], dict[str, Any]], Facts]


def none(group: ProcessGroup, cores: set[int], options: dict[str, Any]) -> Facts:
    return {}


def node(group: ProcessGroup, cores: set[int], options: dict[str, Any]) -> Facts:
    """Starts one node of this project's store."""
    flags = ["--dram", str(SEGMENT_BYTES), "--transports", options["transport"]]
    flags += options.get("node_flags", ())
    _, facts = start_ready_node(group, cores, "node", *flags)
    return {"url": f"node://{facts['rpc']}", "token": TOKEN}


def start_ready_node(group: ProcessGroup, cores: set[int], name: str, *flags: str) -> tuple[ChildProcess, Facts]:
    """Starts a node with the given flags and waits until it is ready; `facts["rpc"]` is its address."""
    child, reports = start_node(group, cores, name, *flags)
    return child, wait_ready(child, reports)


def start_node(group: ProcessGroup, cores: set[int], name: str, *flags: str) -> tuple[ChildProcess, int]:
    """Starts a node without waiting for it (see `processes.ready`)."""
    return start_process(group, cores, "store", name, *flags)


def start_process(group: ProcessGroup, cores: set[int], verb: str, name: str, *flags: str) -> tuple[ChildProcess, int]:
    """Starts one of this project's processes; returns it and the descriptor of its status reports."""
    command = python_command("moonserve", verb, "--instance-id", name, "--log-level", "warning", *flags)
    environment = {"MOONSERVE_CLUSTER_TOKEN": TOKEN}
    return start_reporting(
        lambda line, fds: group.start(name, line, cores=cores, pass_fds=fds, environment=environment),
        [*command, "--status-fd"],
    )


def redis(group: ProcessGroup, cores: set[int], options: dict[str, Any]) -> Facts:
    binary = shutil.which("redis-server")
    if binary is None:
        raise ContestantError("redis-server is not installed")
    port = free_port()
    here = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(group.folder)]
    memory_only = ["--save", "", "--appendonly", "no"]
    child = group.start("redis", [binary, *here, *memory_only], cores=cores)
    wait_listening(child, port)
    return {"port": port}


def mooncake(group: ProcessGroup, cores: set[int], options: dict[str, Any]) -> Facts:
    """Starts a master and, unless the client holds the segment itself, the process that does."""
    master = _master(group, cores)
    if options["path"] == "tcp":
        command = python_command(
            "benchmarks.store.speed.mooncake",
            master,
            str(SEGMENT_BYTES),
            interpreter=PEERS / "python",
        )
        start = partial(_start, group, cores, "segment")
        wait_ready(*start_reporting(start, command))
    if options["path"] == "shm":
        return {"master": master, "client": _real_client(group, cores, master)}
    return {"master": master}


def _master(group: ProcessGroup, cores: set[int]) -> str:
    port = free_port()
    flags = ["--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1"]
    flags += [f"--metrics_port={free_port()}", "--rpc_thread_num=2"]
    child = group.start("master", [str(PEERS / "mooncake_master"), *flags], cores=cores)
    wait_listening(child, port)
    return f"127.0.0.1:{port}"


def _real_client(group: ProcessGroup, cores: set[int], master: str) -> str:
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
    wait_listening(child, port)
    return f"127.0.0.1:{port}"


def _start(group: ProcessGroup, cores: set[int], name: str, command: Any, fds: Any) -> ChildProcess:
    return group.start(name, command, cores=cores, pass_fds=fds)


# RPCs to this project's processes that the store's client lacks. Each call opens its own connection.

TIMEOUT_S = 60.0
T = TypeVar("T")


def node_stats(address: str) -> kvstore_pb2.StoreStatsReply:
    """Returns a node's statistics. Raises PeerLost."""

    async def ask(channels: Channels) -> kvstore_pb2.StoreStatsReply:
        stub = kvstore_pb2_grpc.KvStoreStub(channels.to(address))
        request = kvstore_pb2.StoreStatsRequest()
        return await channels.call(stub.Stats, request, timeout_s=TIMEOUT_S)

    return asyncio.run(_with_channels(ask))


def directory_view(address: str) -> directory_pb2.GetNodesReply:
    """Returns the directory's view of the nodes. Raises PeerLost."""

    async def ask(channels: Channels) -> directory_pb2.GetNodesReply:
        stub = directory_pb2_grpc.DirectoryStub(channels.to(address))
        request = directory_pb2.GetNodesRequest()
        return await channels.call(stub.GetNodes, request, timeout_s=TIMEOUT_S)

    return asyncio.run(_with_channels(ask))


async def _with_channels(ask: Callable[[Channels], Awaitable[T]]) -> T:
    channels = Channels(TOKEN)
    try:
        return await ask(channels)
    finally:
        await channels.close()
