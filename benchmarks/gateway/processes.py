"""Starts the gateway on its own core, as users run it, and the process of its clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.gateway.stub import CLUSTER_TOKEN
from deploy.ports import free_port

_READY_S = 60.0


class GatewayProcess:
    """A running `moonserve gateway` in front of a stub cluster."""

    def __init__(self, process: Process, port: int) -> None:
        self.port = port
        self._process = psutil.Process(process.pid)

    def cpu_s(self) -> float:
        """Returns the processor time of all its threads so far."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def resident_mib(self) -> float:
        return float(self._process.memory_info().rss) / 2**20


@contextlib.asynccontextmanager
async def running_gateway(
    conductor: str, model: Path, core: int, profiler: Sequence[str] = ()
) -> AsyncIterator[GatewayProcess]:
    """Starts a gateway bound to one core and waits until it is ready. `profiler`: command to run it under."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *("taskset", "--cpu-list", str(core)),
        *(profiler or (sys.executable,)),
        *("-m", "moonserve", "gateway", "--model", str(model), "--conductor", conductor),
        *("--port", str(port), "--log-level", "warning", "--request-timeout-s", "3600"),
        env={**os.environ, "MOONSERVE_CLUSTER_TOKEN": CLUSTER_TOKEN},
    )
    try:
        await _until_ready(port)
        yield GatewayProcess(process, port)
    finally:
        process.terminate()
        await process.wait()


async def _until_ready(port: int) -> None:
    async with asyncio.timeout(_READY_S), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{port}/ready") as reply:
                    if reply.status == 200:
                        return
            await asyncio.sleep(0.05)


class Clients:
    """A client process with open streams at the gateway."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def seen(self) -> dict[str, Any]:
        """Returns the result of `benchmarks.gateway.client`, once the streams have ended."""
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return found


@contextlib.asynccontextmanager
async def clients(port: int, num_streams: int, text: str) -> AsyncIterator[Clients]:
    """Starts a client process with `num_streams` streams and ends it with the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.gateway.client", str(port), str(num_streams), text),
        stdin=PIPE,
        stdout=PIPE,
        limit=2**30,
    )
    try:
        yield Clients(process)
    finally:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(b"\n")
            await process.stdin.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10.0):
                await process.communicate()
        if process.returncode is None:
            process.kill()
            await process.wait()
