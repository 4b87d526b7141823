"""The conductor's process: it serves, keeps house, stops, and says what is wrong with its options."""

from __future__ import annotations

import asyncio
import os

import pytest

from conductor.config import ConductorConfig
from conductor.policies import PUBLISHED_POLICY
from conductor.service import serve
from deploy.ports import free_port
from protocol.conductors import Conductors
from protocol.config import load
from protocol.errors import ConfigError
from protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc
from protocol.process import Lifecycle
from protocol.rpc import Channels
from protocol.status import until_ready
from tests.conductor.test_conductor_service import TOKEN, registration
from tests.patience import PATIENCE_S


async def test_the_process_body_serves_housekeeps_and_stops() -> None:
    reader, writer = os.pipe()
    flags = ["--lease-s", "0.2", "--heartbeat-interval-s", "0.02"]
    config = load(ConductorConfig, flags, prog="conductor", environ={})
    lifecycle = Lifecycle(writer)
    task = asyncio.create_task(serve(config, lifecycle))
    facts = await asyncio.wait_for(until_ready(reader), PATIENCE_S)
    os.close(writer)
    channels = Channels(config.cluster_token)
    stub = conductor_pb2_grpc.ConductorStub(channels.to(facts["rpc"]))
    message = registration("p0", common_pb2.ROLE_PREFILL)
    reply = await channels.call(stub.Register, message, timeout_s=PATIENCE_S)
    assert reply.lease_s == pytest.approx(0.2)
    async with asyncio.timeout(PATIENCE_S):
        while True:  # each call waits for the server, which waits for its own timer
            request = conductor_pb2.GetClusterRequest()
            view = await channels.call(stub.GetCluster, request, timeout_s=PATIENCE_S)
            if not view.instances:
                break
    await channels.close()
    lifecycle.stopping.set()
    async with asyncio.timeout(PATIENCE_S):
        await task


async def test_a_conductor_without_a_registry_is_found_at_one_of_several_addresses() -> None:
    """As where it may be on several hosts, and is on one."""
    lifecycle = Lifecycle(None)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    lifecycle.ready = lambda **facts: ready.set_result(facts["rpc"])  # type: ignore[method-assign]
    task = asyncio.create_task(serve(ConductorConfig(cluster_token=TOKEN), lifecycle))
    channels = Channels(TOKEN)
    nobody = f"127.0.0.1:{free_port()}"
    conductors = Conductors(channels, f"{nobody},{await ready}")
    view = await conductors.call(
        lambda conductor: conductor.GetCluster, conductor_pb2.GetClusterRequest(), timeout_s=PATIENCE_S
    )
    assert not view.ready
    await channels.close()
    lifecycle.stopping.set()
    await task


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "1", "--host", "0.0.0.0"],
        ["--heartbeat-interval-s", "5", "--lease-s", "2"],
        ["--ttft-slo", "0"],
        ["--placement-policy", PUBLISHED_POLICY, "--balancing-threshold", "0.5"],
        ["--decision-mib", "0"],
        ["--placement-policy", "nonsense"],
        ["--placement-policy", "nowhere.py:Nothing"],
    ],
)
async def test_values_that_cannot_work_are_config_errors(flags: list[str]) -> None:
    config = load(ConductorConfig, flags, prog="conductor", environ={})
    with pytest.raises(ConfigError):
        await serve(config, Lifecycle(None))
