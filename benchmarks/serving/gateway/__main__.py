"""Measures the gateway's cost with a stub cluster: `python -m benchmarks.serving.gateway --json out/gateway.json`.

The gateway runs as for users, bound to one core. The stub cluster and the clients share the other cores. *Added
latency* lasts from just before a step's message is put on its worker's stream until a client has read the token. So it
includes the worker's stream, the gateway and the client's own processing. *Chunks per second* counts events on the
wire: a gateway that lags merges several tokens into one event.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

from benchmarks.harness.measure import medians, table, write_json
from benchmarks.serving.gateway.stub import CLUSTER_TOKEN, StubCluster
from moonserve.deploy.launcher.ports import free_port
from moonserve.gateway.text.tokenizer import load_tokenizer
from moonserve.models import demo_model_path
from moonserve.protocol.latency import percentile

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


class ClientProcess:
    """A client process with open streams at the gateway."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def seen(self) -> dict[str, Any]:
        """Returns the result of `benchmarks.serving.gateway.client`, once the streams have ended."""
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return found


@contextlib.asynccontextmanager
async def client_process(port: int, num_streams: int, text: str) -> AsyncIterator[ClientProcess]:
    """Starts a client process with `num_streams` streams and ends it with the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.serving.gateway.client", str(port), str(num_streams), text),
        stdin=PIPE,
        stdout=PIPE,
        limit=2**30,
    )
    try:
        yield ClientProcess(process)
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


TEXT = " to"  # one token of the demo model
Row = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLoad:
    """Streams that get a token every `interval_s`; 0 = as fast as the gateway accepts them."""

    num_streams: int
    interval_s: float
    num_steps: int


PACED = (
    StreamLoad(num_streams=1, interval_s=0.010, num_steps=400),
    StreamLoad(num_streams=64, interval_s=0.010, num_steps=400),
    StreamLoad(num_streams=512, interval_s=0.050, num_steps=100),
)
FLAT_OUT = (
    StreamLoad(num_streams=1, interval_s=0.0, num_steps=20_000),
    StreamLoad(num_streams=64, interval_s=0.0, num_steps=1_500),
    StreamLoad(num_streams=512, interval_s=0.0, num_steps=200),
)
NUM_IDLE = 2_000
IDLE_S = 20.0


async def stream_row(stub: StubCluster, gateway: GatewayProcess, pace: StreamLoad) -> Row:
    """Runs the streams of a pace; returns their figures."""
    async with client_process(gateway.port, pace.num_streams, TEXT) as streams:
        await stub.gather(pace.num_streams)
        begun_cpu_s, begun_at = gateway.cpu_s(), time.monotonic()
        await stub.run(pace.num_steps, pace.interval_s)
        seen = await streams.seen()
        cpu_s = gateway.cpu_s() - begun_cpu_s
    wall_s = max(map(max, seen["arrived_at"])) - begun_at
    added_ms = [
        (arrived_at - sent_at) * 1e3
        for arrivals in seen["arrived_at"]
        for sent_at, arrived_at in zip(stub.sent_at, arrivals, strict=True)
    ]
    return {
        "chunks_per_s": seen["num_events"] / wall_s,
        "chunks_per_cpu_s": seen["num_events"] / cpu_s,
        "tokens_per_s": len(added_ms) / wall_s,
        "added_p50_ms": percentile(added_ms, 50),
        "added_p99_ms": percentile(added_ms, 99),
    }


async def idle_row(stub: StubCluster, gateway: GatewayProcess, num_streams: int) -> Row:
    """Measures streams that got one token and wait for the next; 0 = no streams."""
    async with client_process(gateway.port, num_streams, TEXT):
        await stub.gather(num_streams)
        await stub.run(min(num_streams, 1), 0.0, ends=False)
        await asyncio.sleep(2.0)
        begun_cpu_s, begun_at = gateway.cpu_s(), time.monotonic()
        await asyncio.sleep(IDLE_S)
        cpu_s, wall_s = gateway.cpu_s() - begun_cpu_s, time.monotonic() - begun_at
        return {"cpu_percent": 100 * cpu_s / wall_s, "resident_mib": gateway.resident_mib()}


Measure = Callable[[StubCluster, GatewayProcess], Awaitable[Row]]


async def _run_once(measure: Measure, core: int, profiler: Sequence[str]) -> Row:
    [token_id] = load_tokenizer(demo_model_path()).encode(TEXT, add_special_tokens=False)
    stub = StubCluster(token_id)  # type: ignore[abstract]  # gateways call no other methods
    await stub.start()
    async with running_gateway(stub.address, demo_model_path(), core, profiler) as gateway:
        row = await measure(stub, gateway)
    await stub.stop()
    return row


def measures() -> dict[str, Measure]:
    """Returns all measurements by name."""
    found: dict[str, Measure] = {}
    for pace in PACED:
        every = f"{pace.interval_s * 1e3:.0f} ms"
        found[f"{pace.num_streams} streams, a token each {every}"] = partial(stream_row, pace=pace)
    for pace in FLAT_OUT:
        found[f"{pace.num_streams} streams, flat out"] = partial(stream_row, pace=pace)
    for num_streams in (0, NUM_IDLE):
        found[f"{num_streams} idle streams"] = partial(idle_row, num_streams=num_streams)
    return found


def report(rows: Mapping[str, Row]) -> str:
    """Formats the tables of active and idle streams, and the bars."""
    streams = {name: row for name, row in rows.items() if "added_p50_ms" in row}
    idle = {name: row for name, row in rows.items() if "resident_mib" in row}
    parts = []
    if streams:
        headers = ("", "chunks/s", "chunks per CPU-second", "tokens/s", "added p50 ms", "p99 ms")
        parts.append(table(headers, [[name, *row.values()] for name, row in streams.items()]))
    if idle:
        parts.append(
            table(
                ("", "% of a core", "resident MiB"),
                [[name, *row.values()] for name, row in idle.items()],
            )
        )
    return "\n\n".join([*parts, *_bars(rows)])


def _bars(rows: Mapping[str, Row]) -> list[str]:
    bars = (
        ("64 streams, flat out", "chunks_per_s", ">=", 25_000.0),
        ("64 streams, a token each 10 ms", "added_p50_ms", "<=", 2.0),
        ("0 idle streams", "cpu_percent", "<=", 1.0),
        (f"{NUM_IDLE} idle streams", "resident_mib", "<=", 400.0),
    )
    lines = []
    for name, figure, sign, bar in bars:
        if name in rows:
            value = rows[name][figure]
            held = value >= bar if sign == ">=" else value <= bar
            lines.append(f"{'held  ' if held else 'MISSED'} {name}: {figure} {value:,.2f} {sign} {bar:,.0f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="measures whose name holds this")
    parser.add_argument("--profiler", default="", help="command to run the gateway under")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    rows: dict[str, Row] = {}
    for name, measure in measures().items():
        if args.only in name:
            num_rounds = 1 if "idle" in name else args.rounds
            runs = (_run_once(measure, cores[0], args.profiler.split()) for _ in range(num_rounds))
            rows[name] = medians([uvloop.run(run) for run in runs])
            print(name, {figure: round(value, 2) for figure, value in rows[name].items()}, flush=True)
    print(report(rows))
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
