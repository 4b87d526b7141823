"""Measures the conductor's rate through RPC on loopback, for `benchmarks.conductor`.

A server process holds the same cluster and index. The client, another process, keeps WIDTH requests in flight: a
`Place` and, in rows with reports, a `Report` of its first token and of its end. Rates are placements per wall-clock
second, with both processes at work, and per CPU second of the server, which is the capacity of one core. Transports are
`host:port`, as in the gateway, which is the lean transport after the first call, and gRPC alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from benchmarks.conductor.placement_load import Load, Scenario
from benchmarks.harness.measure import medians
from moonserve.conductor.events import Place
from moonserve.conductor.placement.policies import PUBLISHED_POLICY
from moonserve.conductor.service import ConductorMetrics, ConductorService
from moonserve.protocol.kv_blocks import pack_keys
from moonserve.protocol.latency import percentile
from moonserve.protocol.pb import conductor_pb2, conductor_pb2_grpc
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer

TOKEN = "benchmark"
TIMEOUT_S = 30.0
WIDTH = 64
NUM_PLACEMENTS = 2_000
Row = dict[str, Any]


def rpc_rows(scenario: Scenario, rounds: int) -> list[Row]:
    """Measures `Place` alone and with both reports, through each transport."""
    rows: list[Row] = []
    with _served(scenario) as server:
        for transport, address in server.addresses.items():
            for reports in (False, True):
                measured = [_round(server, address, reports) for _ in range(rounds + 1)][1:]
                calls = "Place, 2 Report" if reports else "Place"
                rows.append({"transport": transport, "calls": calls, **medians(measured)})
    return rows


class _Server:
    """Handle of the server process: its addresses and CPU time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._to, self._from = process.stdin, process.stdout
        self.addresses: dict[str, str] = json.loads(self._from.readline())
        self.num_rounds = 0

    def cpu_s(self) -> float:
        self._to.write("\n")
        self._to.flush()
        return float(json.loads(self._from.readline()))


@contextlib.contextmanager
def _served(scenario: Scenario) -> Iterator[_Server]:
    command = [sys.executable, "-m", "benchmarks.conductor.placement_rpc"]
    command += [str(scenario.num_instances), str(scenario.num_blocks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield _Server(process)
        process.communicate()


def _round(server: _Server, address: str, reports: bool) -> dict[str, float]:
    return uvloop.run(_calls(server, address, reports))


async def _calls(server: _Server, address: str, reports: bool) -> dict[str, float]:
    server.num_rounds += 1
    requests = asyncio.Queue[conductor_pb2.PlaceRequest]()
    for request in _place_requests(server.num_rounds):
        requests.put_nowait(request)
    channels = Channels(TOKEN)
    stub = conductor_pb2_grpc.ConductorStub(channels.to(address))
    took: list[float] = []
    begun_cpu_s, begun_at = server.cpu_s(), time.perf_counter()
    await asyncio.gather(*(_client(channels, stub, requests, took, reports) for _ in range(WIDTH)))
    wall_s, cpu_s = time.perf_counter() - begun_at, server.cpu_s() - begun_cpu_s
    await channels.close()
    return {
        "placements_per_s": NUM_PLACEMENTS / wall_s,
        "per_server_cpu_s": NUM_PLACEMENTS / cpu_s,
        f"p50_ms_of_{WIDTH}": percentile(took, 50) * 1e3,
        f"p99_ms_of_{WIDTH}": percentile(took, 99) * 1e3,
    }


def _place_requests(round_number: int) -> Iterator[conductor_pb2.PlaceRequest]:
    load = Load(Scenario(num_instances=2, num_blocks=10_000))  # other chains: only the common blocks match
    for number, (_, event) in enumerate(load.script(NUM_PLACEMENTS, load.rate)):
        if isinstance(event, Place):
            yield conductor_pb2.PlaceRequest(
                request_id=f"{round_number}-{number}",
                block_keys=pack_keys(event.block_keys),
                num_prompt_tokens=event.num_prompt_tokens,
                max_tokens=event.max_tokens,
            )


async def _client(
    channels: Channels,
    stub: conductor_pb2_grpc.ConductorAsyncStub,
    requests: asyncio.Queue[conductor_pb2.PlaceRequest],
    took: list[float],
    reports: bool,
) -> None:
    while not requests.empty():
        request = requests.get_nowait()
        begun_at = time.perf_counter()
        reply = await channels.call(stub.Place, request, timeout_s=TIMEOUT_S)
        took.append(time.perf_counter() - begun_at)
        if not reply.HasField("placement"):
            raise RuntimeError(f"not placed: {reply}")
        phases = conductor_pb2.ReportRequest
        for phase in (phases.PHASE_FIRST_TOKEN, phases.PHASE_FINISHED) if reports else ():
            report = phases(request_id=request.request_id, phase=phase, elapsed_s=0.05)
            await channels.call(stub.Report, report, timeout_s=TIMEOUT_S)


@contextlib.asynccontextmanager
async def _serving(scenario: Scenario) -> AsyncIterator[dict[str, str]]:
    state = Load(scenario).cluster(PUBLISHED_POLICY)
    # The clock stands still, so that instances, which send no heartbeats, do not time out.
    service = ConductorService(state, ConductorMetrics(CollectorRegistry()), clock=lambda: 1.0)
    server = RpcServer(TOKEN)
    conductor_pb2_grpc.add_ConductorServicer_to_server(service, server.grpc)
    server.add_socket_service("Conductor", service)
    address = await server.start("127.0.0.1", 0)
    without_lean = RpcServer(TOKEN)
    conductor_pb2_grpc.add_ConductorServicer_to_server(service, without_lean.grpc)
    yield {"grpc": await without_lean.start("127.0.0.1", 0), "lean": address}
    await asyncio.gather(server.stop(0), without_lean.stop(0))


async def _serve(scenario: Scenario) -> None:
    """Prints the server's addresses, then its CPU seconds for each line on stdin, until stdin ends."""
    async with _serving(scenario) as addresses:
        print(json.dumps(addresses), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(time.process_time()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("num_instances", type=int)
    parser.add_argument("num_blocks", type=int)
    arguments = parser.parse_args()
    scenario = Scenario(num_instances=arguments.num_instances, num_blocks=arguments.num_blocks)
    uvloop.run(_serve(scenario))


if __name__ == "__main__":
    main()
