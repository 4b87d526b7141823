"""Active conductors as real processes, with simulated workers and gateways that call them over sockets.

`python -m benchmarks.conductor.fleet --live` starts 1, then 4 conductors. One process holds the memberships of 256
workers, as workers keep them; others place requests as gateways do and report each first token and end. Then the first
of four conductors is killed. All share the cores of this machine, so rates are also given per processor second.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import uvloop

from benchmarks.conductor.placement_load import DECODE, LAYOUT, POOL_BLOCKS, PREFILL, PROMPT_BLOCKS
from moonserve.conductor.events import Register
from moonserve.deploy.launcher.ports import free_port
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.kv_blocks import KEY_BYTES
from moonserve.protocol.membership.conductor_client import ConductorClient
from moonserve.protocol.membership.heartbeats import BlockLog, Membership
from moonserve.protocol.membership.shards import Shard, in_order
from moonserve.protocol.pb import conductor_pb2
from moonserve.protocol.request import Endpoint, InstanceId, Role
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.protocol.rpc.wire import to_message

NUM_WORKERS = 256
NUM_GATEWAYS = 2
WIDTH = 32  # requests at once of each gateway
NUM_SYSTEM_PROMPTS, SYSTEM_BLOCKS = 500, 8
TIMEOUT_S = 20.0
Row = dict[str, Any]


def live_rows(seconds: float) -> list[Row]:
    """Measures one conductor, four, and four of which one is killed."""
    return [_row(1, seconds, kill=False), _row(4, seconds, kill=False), _row(4, seconds, kill=True)]


def _row(num_shards: int, seconds: float, kill: bool) -> Row:
    ports = [free_port() for _ in range(num_shards)]
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    token = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        conductors = [stack.enter_context(started_conductor(port, addresses, num_shards, token)) for port in ports]
        workers = stack.enter_context(_helper("workers", addresses, token))
        assert workers.stdout is not None
        workers.stdout.readline()
        gateways = [
            stack.enter_context(_helper("gateway", addresses, token, str(seconds))) for _ in range(NUM_GATEWAYS)
        ]
        before_s = _cpu_s(conductors)
        if kill:
            time.sleep(seconds / 2)
            os.kill(conductors[0].pid, signal.SIGKILL)
        told = [json.loads(gateway.communicate()[0]) for gateway in gateways]
        spent_s = _cpu_s(conductors) - before_s if not kill else float("nan")
    placed = sum(each["placed"] for each in told)
    return {
        "conductors": num_shards,
        "one killed": kill,
        "placements/s": placed / seconds,
        "per processor second of a conductor": placed / spent_s,
        "p50 ms": float(np.median([each["p50_ms"] for each in told])),
        "p99 ms": max(each["p99_ms"] for each in told),
        "not placed": sum(each["failed"] for each in told),
        "longest wait ms of its share": max(each["worst_ms_of_first"] for each in told),
    }


def _cpu_s(processes: Sequence[subprocess.Popen[str]]) -> float:
    times = [psutil.Process(process.pid).cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


@contextlib.contextmanager
def started_conductor(
    port: int, addresses: str, num_shards: int, token: str, *flags: str
) -> Iterator[subprocess.Popen[str]]:
    """Runs one of `num_shards` conductors within the block."""
    command = [sys.executable, "-m", "moonserve", "conductor", "--port", str(port), "--admission", "none", *flags]
    command += ["--shards", addresses] if num_shards > 1 else []
    with _started(command, token) as process:
        yield process


@contextlib.contextmanager
def _helper(kind: str, addresses: str, token: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with _started(
        [sys.executable, "-m", "benchmarks.conductor.fleet.live", kind, addresses, *arguments], token
    ) as process:
        yield process


@contextlib.contextmanager
def _started(command: Sequence[str], token: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "MOONSERVE_CLUSTER_TOKEN": token}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


# The processes of workers and of gateways


async def _workers(addresses: str) -> None:
    """Keeps the memberships of all workers until the process ends."""
    channels = Channels(os.environ["MOONSERVE_CLUSTER_TOKEN"])
    load = conductor_pb2.Load(free_blocks=POOL_BLOCKS)
    memberships = [
        Membership(channels, addresses, _registration(number), lambda: load, BlockLog())
        for number in range(NUM_WORKERS)
    ]
    tasks = [asyncio.create_task(membership.run()) for membership in memberships]
    await asyncio.gather(*(membership.registered.wait() for membership in memberships))
    await asyncio.sleep(5.0)  # shares become equal
    print(flush=True)
    await asyncio.gather(*tasks)


def _registration(number: int) -> conductor_pb2.RegisterRequest:
    role = Role.PREFILL if number % 2 == 0 else Role.DECODE
    name = InstanceId(f"{role.value}-{number // 2}")
    endpoint = Endpoint(instance_id=name, epoch=1, rpc_address=f"{name}:1", transfer_address=f"{name}:2", host=name)
    register = Register(
        endpoint=endpoint, role=role, layout=LAYOUT, fingerprint="fleet", num_blocks=POOL_BLOCKS,
        prefill_profile=PREFILL, decode_profile=DECODE, max_num_seqs=4_096, max_model_len=1_000_000,
    )  # fmt: skip
    return to_message(conductor_pb2.RegisterRequest, register, transfer_bytes_per_s=1e10)


async def _gateway(addresses: str, seconds: float) -> None:
    """Places requests for this long, and prints what happened."""
    channels = Channels(os.environ["MOONSERVE_CLUSTER_TOKEN"])
    conductors = ConductorClient(channels, addresses)
    rng = np.random.default_rng(os.getpid())
    systems = np.random.default_rng(1).integers(0, 256, (NUM_SYSTEM_PROMPTS, SYSTEM_BLOCKS * KEY_BYTES), np.uint8)
    shards = [Shard(address=address, weight=1.0) for address in addresses.split(",")]
    took: list[float] = []
    of_first: list[float] = [0.0]
    failed = 0
    ends_at = time.monotonic() + seconds

    async def one_after_another() -> None:
        nonlocal failed
        while time.monotonic() < ends_at:
            system = systems[int(rng.integers(NUM_SYSTEM_PROMPTS))].tobytes()
            request = conductor_pb2.PlaceRequest(
                request_id=secrets.token_hex(8), max_tokens=200,
                num_prompt_tokens=PROMPT_BLOCKS * LAYOUT.block_size + 1,
                block_keys=system + rng.bytes((PROMPT_BLOCKS - SYSTEM_BLOCKS) * KEY_BYTES),
            )  # fmt: skip
            began_at = time.monotonic()
            try:
                reply = await conductors.call(lambda stub: stub.Place, request, timeout_s=TIMEOUT_S)
                failed += not reply.HasField("placement")
            except MoonserveError:
                failed += 1
                continue
            took.append(time.monotonic() - began_at)
            if in_order(system[:KEY_BYTES], shards)[0] is shards[0]:
                of_first.append(took[-1])
            for phase in (conductor_pb2.ReportRequest.PHASE_FIRST_TOKEN, conductor_pb2.ReportRequest.PHASE_FINISHED):
                report = conductor_pb2.ReportRequest(request_id=request.request_id, phase=phase, elapsed_s=0.05)
                with contextlib.suppress(MoonserveError):  # of a conductor that was killed
                    await conductors.call(lambda stub: stub.Report, report, timeout_s=1.0)

    await asyncio.gather(*(one_after_another() for _ in range(WIDTH)))
    p50_ms, p99_ms = (float(np.percentile(took, share)) * 1e3 for share in (50, 99))
    told = {
        "placed": len(took),
        "failed": failed,
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "worst_ms_of_first": max(of_first) * 1e3,
    }
    print(json.dumps(told))


def main() -> None:
    kind, addresses, *rest = sys.argv[1:]
    uvloop.run(_workers(addresses) if kind == "workers" else _gateway(addresses, float(rest[0])))


if __name__ == "__main__":
    main()
