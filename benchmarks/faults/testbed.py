"""What faults are injected into: a Redis server that comes back empty, streams that resume, a local cluster."""

import contextlib
import http.client
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Timer
from typing import Any

import grpc
import psutil

from moonserve.deploy.launcher.local_cluster import LocalCluster
from moonserve.deploy.launcher.ports import free_port
from moonserve.protocol.pb import conductor_pb2, leadership_pb2, leadership_pb2_grpc, worker_pb2, worker_pb2_grpc
from moonserve.protocol.rpc.grpc_transport import TOKEN_HEADER

_START_S = 10.0
AWAY_S = 1.0
"""Delay from its end to its restart, as by a service manager."""


class Redis:
    """A Redis process on loopback, without persistence. Raises FileNotFoundError if redis-server is not installed."""

    def __init__(self, folder: Path) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise FileNotFoundError("redis-server is not installed: apt-get install redis-server")
        self.port = free_port()
        here = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command = [binary, *here, "--save", "", "--appendonly", "no"]
        self._process = self._start()
        self._return: Timer | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def come_back(self) -> None:
        """Schedules the restart of the killed server after `AWAY_S`."""
        self._return = Timer(AWAY_S, self._restart)
        self._return.start()

    def settle(self) -> None:
        """Waits until a scheduled restart is complete."""
        if self._return is not None:
            self._return.join()

    def close(self) -> None:
        self.settle()
        self._process.kill()
        self._process.wait()

    def _restart(self) -> None:
        self._process.wait()
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        give_up_at = time.monotonic() + _START_S
        while time.monotonic() < give_up_at:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return process
            time.sleep(0.01)
        process.kill()
        raise TimeoutError(f"redis-server does not listen at port {self.port}")


# A client that reads one stream, records the arrival of each token, and resumes if its gateway is lost.

_RECONNECT_S = 0.05
_GIVE_UP_S = 120.0


class StreamThread(threading.Thread):
    """Thread that reads one stream; starts itself. `body`: of `/v1/completions`, with `return_token_ids`."""

    def __init__(
        self, address: tuple[str, int], body: dict[str, Any], name: str, within: Callable[[Callable[[], None]], None]
    ) -> None:
        """`name`: the request's X-Request-Id; `within`: runs a call on the host that the stream is read on."""
        super().__init__(daemon=True)
        self.request_name = name
        self.body = body
        self.began_at = time.monotonic()
        self.token_at: list[float] = []  # arrival time of each token
        self.token_ids: list[int] = []
        self.ids: set[str] = set()
        self.headers: dict[str, str] = {}
        self.error = ""
        self.resumed = 0
        self.num_cached = 0  # tokens of the prompt that were not computed
        self._address = address
        self._within = within
        options = {"include_event_ids": True, "include_usage": True}
        self._body = {**body, "stream": True, "stream_options": options}
        self._last_id = ""
        self.start()

    @property
    def count(self) -> int:
        """Number of tokens so far."""
        return len(self.token_at)

    def run(self) -> None:
        self._within(self._read)

    def _read(self) -> None:
        give_up_at = self.began_at + _GIVE_UP_S
        while not self._read_once():
            if self.error or time.monotonic() > give_up_at:
                self.error = self.error or "it never came to an end"
                return
            self.resumed += 1
            time.sleep(_RECONNECT_S)

    def _read_once(self) -> bool:
        """Reads one connection. Returns True if the stream ended; False if the connection broke or on an error."""
        connection = http.client.HTTPConnection(*self._address, timeout=_GIVE_UP_S)
        headers = {"content-type": "application/json", "x-request-id": self.request_name}
        if self._last_id:
            headers["last-event-id"] = self._last_id
        try:
            connection.request("POST", "/v1/completions", json.dumps(self._body), headers)
            reply = connection.getresponse()
            self.headers = self.headers or {k.lower(): v for k, v in reply.getheaders()}
            if reply.status != 200:
                self.error = f"{reply.status} {reply.read().decode(errors='replace')}"
                return False
            return any(self._take(line.decode().rstrip("\n")) for line in reply)
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _take(self, line: str) -> bool:
        """Parses a line. Returns True if it ends the stream."""
        field, _, value = line.partition(": ")
        if field == "id":
            self._last_id = value
        elif field == "data":
            if value == "[DONE]":
                return True
            self._add(json.loads(value))
        return False

    def _add(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = str(chunk["error"])
            return
        self.ids.add(chunk["id"])
        if chunk.get("usage"):
            self.num_cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
        for choice in chunk["choices"]:
            new = choice.get("token_ids") or []
            self.token_ids += new
            self.token_at += [time.monotonic()] * len(new)

    def longest_gap_s(self, since: float) -> float:
        """Returns the longest wait for a token that ended after `since`. The first token's starts at `since`."""
        begin = since if not self.token_at or self.token_at[0] > since else self.began_at
        instants = [begin, *(at for at in self.token_at if at >= begin)]
        gaps = [b - a for a, b in itertools.pairwise(instants) if b > since]
        return max(gaps, default=0.0)


# A local cluster whose processes can be found, killed and stopped.

_PATIENCE_S = 120.0
_POLL_S = 0.01
_WHO_S = 2.0


class Streams:
    """Streams of a cluster, and waits for its moments."""

    def open_stream(self, body: dict[str, Any], name: str) -> StreamThread:
        raise NotImplementedError

    def ask(self, body: dict[str, Any]) -> StreamThread:
        """Starts a stream with a unique request id."""
        name = f"fault-{secrets.token_hex(4)}"
        return self.open_stream({"return_token_ids": True, "ignore_eos": True, **body}, name)

    def whole(self, body: dict[str, Any]) -> StreamThread:
        """Returns an undisturbed stream after its end. Raises RuntimeError if it fails."""
        stream = self.ask(body)
        stream.join()
        if stream.error or stream.resumed:
            raise RuntimeError(f"an undisturbed stream failed: {stream.error}")
        return stream

    def until(self, holds: Callable[[], object]) -> None:
        give_up_at = time.monotonic() + _PATIENCE_S
        while not holds():
            if time.monotonic() > give_up_at:
                raise TimeoutError("it did not come to that")
            time.sleep(_POLL_S)

    def pids(self) -> dict[str, int]:
        """Returns the processes that can be hit, by instance id."""
        return {}

    def settled(self) -> contextlib.AbstractContextManager[None]:
        """On exit, waits until the cluster is as it was."""
        raise NotImplementedError


class FaultCluster(Streams, LocalCluster):
    """A cluster started by `moonserve serve` with the demo model."""

    def __init__(self, *flags: str, log_dir: Path, redis: Redis | None = None) -> None:
        """`redis`: registry in which conductors claim leadership; if given, there are two conductors."""
        self._token = secrets.token_hex(8)
        self._redis = redis
        if redis is not None:
            flags = (*flags, "--conductors", "2", "--registry", redis.url)
        environ = {"MOONSERVE_CLUSTER_TOKEN": self._token}
        super().__init__(None, *flags, log_dir=log_dir, environ=environ)

    def open_stream(self, body: dict[str, Any], name: str) -> StreamThread:
        return StreamThread(("127.0.0.1", self.port), body, name, lambda call: call())

    def pids(self) -> dict[str, int]:
        found = {} if self._redis is None else {"redis": self._redis.pid}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                arguments = child.cmdline()
                if "--instance-id" in arguments:
                    found[arguments[arguments.index("--instance-id") + 1]] = child.pid
        return found

    def processes(self, names: Sequence[str]) -> list[int]:
        """Returns the named processes and those that they have started, such as vLLM's engine."""
        roots = [psutil.Process(pid) for name, pid in self.pids().items() if name in names]
        return [each.pid for root in roots for each in (root, *root.children(recursive=True))]

    def instances(self) -> dict[str, dict[str, Any]]:
        """Returns the instances by id; empty while the gateway does not answer."""
        try:
            return {each["instance_id"]: each for each in self._get("/v1/cluster")["instances"]}
        except (OSError, ValueError):
            return {}

    def prefill_of(self, stream: StreamThread) -> str:
        """Returns the prefill worker of a request; "" = not placed yet."""
        try:
            found = self._get(f"/v1/requests/{stream.request_name}/explain")
        except (OSError, ValueError):
            return ""
        return str(found["decisions"][-1].get("prefill") or "")

    def leader(self) -> str:
        """Returns the name of the leading conductor; "" = none claims to lead."""
        names = sorted(name for name in self.pids() if name.startswith("conductor"))
        return next(filter(self._leads, names), "")

    def _leads(self, name: str) -> bool:
        log = (self.log_dir / f"{name}.log").read_text()
        address = re.findall(r"ready rpc=(\S+)", log)[-1]
        with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
            stub = leadership_pb2_grpc.LeadershipStub(channel)
            request, token = leadership_pb2.WhoRequest(), ((TOKEN_HEADER, self._token),)
            return bool(stub.Who(request, metadata=token, timeout=_WHO_S).leads)
        return False

    def load(self, name: str) -> conductor_pb2.Load:
        """Returns the load that a worker reports now."""
        address = self.instances()[name]["rpc_address"]
        with grpc.insecure_channel(address) as channel:
            return (
                worker_pb2_grpc.WorkerStub(channel)
                .GetStatus(
                    worker_pb2.GetStatusRequest(),
                    metadata=((TOKEN_HEADER, self._token),),
                    timeout=_PATIENCE_S,
                )
                .load
            )

    def kill(self, names: Sequence[str]) -> None:
        """Sends SIGKILL to the named processes. A killed Redis is restarted."""
        pids = self.pids()
        for name in names:
            os.kill(pids[name], signal.SIGKILL)
        if self._redis is not None and "redis" in names:
            self._redis.come_back()

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """On exit, waits until all former processes and instances are back, and the cluster is ready."""
        pids, before = self.pids(), self.instances()

        def are_back() -> bool:
            now, instances = self.pids(), self.instances()
            restarted = {name for name, pid in pids.items() if now.get(name) != pid and name in before}
            return (
                now.keys() >= pids.keys()
                and instances.keys() >= before.keys()
                and all(instances[name]["epoch"] != before[name]["epoch"] for name in restarted)
            )

        yield
        if self._redis is not None:
            self._redis.settle()
        self.until(are_back)
        self.until(self.is_ready)

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=5) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            error.close()
            raise OSError(f"{error.code}") from error


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Stops the processes (SIGSTOP) for the duration of the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
