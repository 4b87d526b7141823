"""A decode worker from start to stop: registration, block events, drain, exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from decode_worker.config import DecodeConfig
from decode_worker.worker import serve
from protocol.errors import ConfigError, NoWorker
from protocol.keys import unpack_keys
from protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, worker_pb2
from protocol.process import Lifecycle
from protocol.rpc import Channels, RpcServer
from protocol.status import Progress, Ready, reports
from tests.decode_worker.held import hold_steps
from tests.decode_worker.prefill_client import BLOCK_SIZE, TOKEN, PrefillClient
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.prometheus import scrape
from tests.random_models import make_model
from tests.services import serving
from transfer import TransferEngine


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("llama", path)
    return path


def config_of(model_path: Path, **changes: Any) -> DecodeConfig:
    values = {
        "instance_id": "decode-0",
        "model": str(model_path),
        "dtype": "float32",
        "cluster_token": TOKEN,
        "block_size": BLOCK_SIZE,
        "kv_cache_memory": 1 << 20,
        **changes,
    }
    return DecodeConfig(**values)


class Conductor(conductor_pb2_grpc.ConductorServicer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.registrations: asyncio.Queue[conductor_pb2.RegisterRequest] = asyncio.Queue()
        self.blocks: set[bytes] = set()
        self.draining = False
        self.left = asyncio.Event()
        self.changed = asyncio.Condition()

    async def Register(
        self, request: conductor_pb2.RegisterRequest, context: object
    ) -> conductor_pb2.RegisterReply:
        await self.registrations.put(request)
        return conductor_pb2.RegisterReply(heartbeat_interval_s=0.05, lease_s=5.0)

    async def Heartbeat(
        self, request: conductor_pb2.HeartbeatRequest, context: object
    ) -> conductor_pb2.HeartbeatReply:
        async with self.changed:
            self.draining = self.draining or request.draining
            self.blocks.update(unpack_keys(request.events.added_keys))
            self.changed.notify_all()
        return conductor_pb2.HeartbeatReply(known=True)

    async def Deregister(
        self, request: conductor_pb2.DeregisterRequest, context: object
    ) -> conductor_pb2.DeregisterReply:
        self.left.set()
        return conductor_pb2.DeregisterReply()


@asynccontextmanager
async def cluster(
    model_path: Path,
) -> AsyncIterator[tuple[Conductor, PrefillClient, Lifecycle, asyncio.Task[None]]]:
    conductor, server, channels = Conductor(), RpcServer(TOKEN), Channels(TOKEN)
    conductor_pb2_grpc.add_ConductorServicer_to_server(conductor, server.grpc)
    address = await server.start("127.0.0.1", 0)
    lifecycle = Lifecycle(None)
    worker = asyncio.create_task(serve(config_of(model_path, conductor=address), lifecycle))
    with TransferEngine(cluster_token=TOKEN) as transfer:
        try:
            registration = await asyncio.wait_for(conductor.registrations.get(), PATIENCE_S)
            assert registration.role == common_pb2.ROLE_DECODE
            assert registration.decode_profile.c0 + registration.decode_profile.c1 > 0
            rpc_address = registration.endpoint.rpc_address
            yield (
                conductor,
                PrefillClient(model_path, transfer, channels, rpc_address),
                lifecycle,
                worker,
            )
        finally:
            lifecycle.stopping.set()
            await asyncio.wait_for(worker, PATIENCE_S)
            await channels.close()
            await server.stop(0)


async def test_a_worker_registers_serves_announces_its_blocks_and_leaves(model_path: Path) -> None:
    async with cluster(model_path) as (conductor, client, lifecycle, worker):
        prompt = client.compute(list(range(20)), 6)
        tokens = 0
        request = worker_pb2.EventsRequest(gateway_id="gateway-0")
        async with asyncio.timeout(PATIENCE_S):
            async for batch in client.channels.stream(client.worker.Events, request):
                if batch.HasField("standing"):  # a gateway that stays away is given up
                    await client.hand_off(prompt)
                tokens += len(batch.tokens)
                if tokens == 5:
                    break
            async with conductor.changed:
                await conductor.changed.wait_for(
                    lambda: conductor.blocks == set(prompt.request.block_keys)
                )
        lifecycle.stopping.set()
        await asyncio.wait_for(worker, PATIENCE_S)
        assert conductor.left.is_set()


async def test_a_draining_worker_says_so_refuses_new_work_and_finishes_old(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = hold_steps(monkeypatch)
    monkeypatch.setattr("decode_worker.worker.STOP_GRACE_S", PATIENCE_S)  # for the last token
    async with cluster(model_path) as (conductor, client, lifecycle, worker):
        prompt = client.compute(list(range(20)), 20)
        await client.hand_off(prompt)
        lifecycle.stopping.set()
        async with asyncio.timeout(PATIENCE_S), conductor.changed:
            await conductor.changed.wait_for(lambda: conductor.draining)
        with pytest.raises(NoWorker):
            await client.reserve(client.compute(list(range(9)), 4))
        finished = False
        request = worker_pb2.EventsRequest(gateway_id="gateway-0")
        async with asyncio.timeout(PATIENCE_S):
            async for batch in client.channels.stream(client.worker.Events, request):
                steps.release()  # one for each batch, and the first says that the stream stands
                finished = finished or any(event.finish_reason for event in batch.tokens)
                if finished:
                    break
        assert finished
        await asyncio.wait_for(worker, PATIENCE_S)


async def test_a_worker_shows_what_its_transfer_engine_holds(model_path: Path) -> None:
    port = free_port()
    async with serving(serve, config_of(model_path, metrics_port=port)):
        metrics = await asyncio.to_thread(scrape, port)
    assert "moonserve_transfer_segments 1.0" in metrics


def test_a_batch_must_hold_a_token_of_each_sequence(model_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 4"):
        config_of(model_path, max_num_seqs=8, max_num_batched_tokens=4)


def start(*flags: str, status_fd: int | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "MOONSERVE_CLUSTER_TOKEN": TOKEN}
    command = [sys.executable, "-m", "decode_worker", "--instance-id", "decode-0", *flags]
    passed = ()
    if status_fd is not None:
        command += ["--status-fd", str(status_fd)]
        passed = (status_fd,)
    return subprocess.Popen(
        command, env=environment, pass_fds=passed, stderr=subprocess.PIPE, text=True
    )


def test_a_process_becomes_ready_and_ends_on_sigterm(model_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    flags = ("--model", str(model_path), "--kv-cache-memory", "1MiB")
    process = start(*flags, status_fd=write_fd)
    os.close(write_fd)
    stages: list[str] = []
    for report in reports(read_fd, PATIENCE_S):
        match report:
            case Progress(stage, _):
                stages.append(stage)
            case Ready():
                process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert "measuring" in stages


def test_a_model_that_is_not_there_is_one_line_and_exit_code_2() -> None:
    process = start("--model", "/does/not/exist")
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert len(errors.strip().splitlines()) == 1
    assert "/does/not/exist" in errors
