"""Measures the cost of one unary call through gRPC and the lean transport, between two processes on one machine.

The call is `Exists` with one key; the servicer only looks it up. Rounds of all variants are interleaved; figures are
medians over the rounds. `python -m benchmarks.conductor.rpc_transports --json out/rpc.json`
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.harness.measure import medians, table, write_json
from moonserve.protocol.latency import percentile
from moonserve.protocol.pb import kvstore_pb2, kvstore_pb2_grpc
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from moonserve.protocol.rpc.socket_client_sync import SPIN_S, SyncChannel

TOKEN = "benchmark"
REQUEST = kvstore_pb2.StoreExistsRequest(keys=[bytes(32)])
TIMEOUT_S = 10.0
WIDTHS = (1, 8, 64)
Row = dict[str, float]


class Lookup(kvstore_pb2_grpc.KvStoreServicer):
    """Servicer that answers `Exists` from a set, like a store node."""

    def __init__(self) -> None:
        self._present = {bytes(32)}

    async def Exists(self, request: Any, context: Any) -> kvstore_pb2.StoreExistsReply:
        present = [key in self._present for key in request.keys]
        return kvstore_pb2.StoreExistsReply(present=present)


async def serve() -> None:
    """Prints the server's addresses and serves until stdin ends."""
    server, servicer = RpcServer(TOKEN), Lookup()  # type: ignore[abstract]  # other methods are not called
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(servicer, server.grpc)
    server.add_socket_service("KvStore", servicer)
    grpc_address = await server.start("127.0.0.1", 0)
    addresses = {"grpc": grpc_address, "tcp": server.lean_address, "unix": server.lean_unix_address}
    print(json.dumps(addresses), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


@contextlib.contextmanager
def served(loop: str) -> Iterator[dict[str, str]]:
    """Runs a server process. Yields its addresses."""
    command = [sys.executable, "-m", "benchmarks.conductor.rpc_transports", "--serve", loop]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.communicate()


def sync_round(address: str, num_calls: int, spin_s: float) -> Row:
    channel = SyncChannel(address, TOKEN, spin_s=spin_s)
    stub: Any = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[call-overload]
    took = []
    for _ in range(num_calls):
        begun_at = time.perf_counter()
        stub.Exists(REQUEST, timeout=TIMEOUT_S)
        took.append(time.perf_counter() - begun_at)
    channel.close()
    return latencies(took)


async def asyncio_round(address: str, width: int, num_calls: int) -> Row:
    """Makes batches of `width` concurrent calls. The time of a call is its batch's time divided by `width`."""
    channels = Channels(TOKEN)
    stub = kvstore_pb2_grpc.KvStoreStub(channels.to(address))

    def call() -> Awaitable[Any]:
        return channels.call(stub.Exists, REQUEST, timeout_s=TIMEOUT_S)

    await call()
    took = []
    for _ in range(num_calls // width):
        begun_at = time.perf_counter()
        if width == 1:
            await call()
        else:
            await asyncio.gather(*(call() for _ in range(width)))
        took.append((time.perf_counter() - begun_at) / width)
    await channels.close()
    return latencies(took)


def asyncio_rounds(address: str, width: int, num_calls: int) -> Row:
    return asyncio.run(asyncio_round(address, width, num_calls))


def latencies(took: list[float]) -> Row:
    took = took[len(took) // 10 :]  # the first calls warm caches and connections
    return {"p50_us": percentile(took, 50) * 1e6, "p99_us": percentile(took, 99) * 1e6}


def rounds_by_name(servers: dict[str, dict[str, str]], num_calls: int) -> dict[str, Callable[[], Row]]:
    """Returns a function per way of calling, by name, that runs one round."""
    found: dict[str, Callable[[], Row]] = {}
    for loop, addresses in servers.items():
        for transport in ("tcp", "unix"):
            address = addresses[transport]
            for spin_s, how in ((0.0, "sync, sleeping"), (SPIN_S, "sync")):
                name = f"lean {transport}, server on {loop}, {how}"
                found[name] = partial(sync_round, address, num_calls, spin_s)
        for transport, address in addresses.items():
            kind = transport if transport == "grpc" else f"lean {transport}"
            for width in WIDTHS:
                name = f"{kind}, server on {loop}, asyncio × {width}"
                found[name] = partial(asyncio_rounds, address, width, num_calls)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", choices=("asyncio", "uvloop"), help=argparse.SUPPRESS)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pin", action="store_true", help="server and client on cores of their own")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.serve:
        factory = uvloop.new_event_loop if args.serve == "uvloop" else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(serve())
        return
    cores = sorted(os.sched_getaffinity(0))
    if args.pin:
        os.sched_setaffinity(0, cores[1:2])
    with served("asyncio") as plain, served("uvloop") as fast:
        if args.pin:
            os.sched_setaffinity(0, cores[:1])
        rounds = rounds_by_name({"asyncio": plain, "uvloop": fast}, args.calls)
        measured = [{name: run() for name, run in rounds.items()} for _ in range(args.rounds)]
    rows = {name: medians([round_[name] for round_ in measured]) for name in rounds}
    print(table(["µs per call", "p50", "p99"], [[n, *row.values()] for n, row in rows.items()]))
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
