"""A local cluster whose processes can be found, killed and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.faults.registry import Redis
from benchmarks.faults.stream import Stream
from deploy.local import LocalCluster
from protocol.pb import (
    conductor_pb2,
    leadership_pb2,
    leadership_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from protocol.rpc import TOKEN_HEADER

_PATIENCE_S = 120.0
_POLL_S = 0.01
_WHO_S = 2.0


class Victims(LocalCluster):
    """A cluster started by `moonserve serve` with the demo model."""

    def __init__(self, *flags: str, log_dir: Path, redis: Redis | None = None) -> None:
        """`redis`: registry in which conductors claim leadership; if given, there are two conductors."""
        self._token = secrets.token_hex(8)
        self._redis = redis
        if redis is not None:
            flags = (*flags, "--conductors", "2", "--registry", redis.url)
        environ = {"MOONSERVE_CLUSTER_TOKEN": self._token}
        super().__init__(None, *flags, log_dir=log_dir, environ=environ)

    def ask(self, body: dict[str, Any]) -> Stream:
        """Starts a stream with a unique request id."""
        name = f"fault-{secrets.token_hex(4)}"
        return Stream(self.port, {"return_token_ids": True, "ignore_eos": True, **body}, name)

    def whole(self, body: dict[str, Any]) -> list[int]:
        """Returns the token ids of an undisturbed stream. Raises RuntimeError if it fails."""
        stream = self.ask(body)
        stream.join()
        if stream.error or stream.resumed:
            raise RuntimeError(f"an undisturbed stream failed: {stream.error}")
        return stream.token_ids

    def pids(self) -> dict[str, int]:
        found = {} if self._redis is None else {"redis": self._redis.pid}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                arguments = child.cmdline()
                if "--instance-id" in arguments:
                    found[arguments[arguments.index("--instance-id") + 1]] = child.pid
        return found

    def instances(self) -> dict[str, dict[str, Any]]:
        """Returns the instances by id; empty while the gateway does not answer."""
        try:
            return {each["instance_id"]: each for each in self._get("/v1/cluster")["instances"]}
        except (OSError, ValueError):
            return {}

    def prefill_of(self, stream: Stream) -> str:
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

    def until(self, holds: Callable[[], object]) -> None:
        give_up_at = time.monotonic() + _PATIENCE_S
        while not holds():
            if time.monotonic() > give_up_at:
                raise TimeoutError("it did not come to that")
            time.sleep(_POLL_S)

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
        before = self.instances().keys()
        names = self.pids().keys()
        yield
        if self._redis is not None:
            self._redis.settle()
        self.until(lambda: self.pids().keys() >= names and self.instances().keys() >= before)
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
