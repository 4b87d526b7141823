"""A conductor and two store processes: what placements waited for is copied from the one store to the other, and
dropped when it is cold. The workers are registrations only: nobody computes, so that nobody fetches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from protocol.keys import BlockKey
from protocol.membership import BlockLog, Membership
from protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, directory_pb2
from protocol.process import running
from protocol.rpc import Channels
from tests import processes
from tests.conductor.test_conductor_service import registration, wish
from tests.e2e.cluster import metric
from tests.kvstore.directory.cluster import put_chain, read_chain, value
from tests.kvstore.nodes import TOKEN, running_node
from tests.patience import PATIENCE_S, answered
from tests.ports import free_port

NUM_BLOCKS = 16
WANTED = b"".join(map(value, range(1, NUM_BLOCKS + 1)))
COOL_S = 5


@contextlib.contextmanager
def running_conductor(*flags: str) -> Iterator[str]:
    """Its address; ended by SIGTERM, with exit code 0."""
    with processes.running("conductor", *flags, token=TOKEN) as (_, facts):
        yield facts["rpc"]


class Conductor:
    """Questions to it, and the workers that it believes in."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channels = Channels(TOKEN)
        self._stub = conductor_pb2_grpc.ConductorStub(self._channels.to(address))
        self._num_placed = 0

    async def call(self, method: str, request: object) -> object:
        return await self._channels.call(getattr(self._stub, method), request, timeout_s=PATIENCE_S)

    async def indexed(self) -> dict[str, int]:
        """Blocks, by instance."""
        view = await self.call("GetCluster", conductor_pb2.GetClusterRequest())
        assert isinstance(view, conductor_pb2.ClusterView)
        return {i.endpoint.instance_id: i.indexed_blocks for i in view.instances}

    async def place(self, keys: Sequence[BlockKey]) -> dict[str, object]:
        """The record of its decision."""
        self._num_placed += 1
        name = f"r{self._num_placed}"
        placed = await self.call("Place", wish(name, keys=keys, tokens=10 * len(keys) + 5))
        assert isinstance(placed, conductor_pb2.PlaceReply)
        assert placed.WhichOneof("outcome") == "placement", placed
        reply = await self.call("Explain", conductor_pb2.ExplainRequest(request_id=name))
        assert isinstance(reply, conductor_pb2.ExplainReply)
        decision: dict[str, object] = json.loads(reply.decision_json)
        return decision

    async def forget_all(self) -> None:
        for number in range(1, self._num_placed + 1):
            phase = conductor_pb2.ReportRequest.PHASE_CANCELLED
            report = conductor_pb2.ReportRequest(request_id=f"r{number}", phase=phase)
            await self.call("Report", report)

    @contextlib.asynccontextmanager
    async def workers(self) -> AsyncIterator[None]:
        """A prefill worker beside each store, and a decode worker, as they are for as long as the block lasts."""
        fast = registration("p0", common_pb2.ROLE_PREFILL)
        far = registration("p1", common_pb2.ROLE_PREFILL)
        fast.home_store, far.home_store = "s0", "s1"
        far.endpoint.host = "another"
        far.transfer_bytes_per_s = 1e8  # what it lacks takes long to come
        decode = registration("d0", common_pb2.ROLE_DECODE)
        async with contextlib.AsyncExitStack() as stack:
            for message in (fast, far, decode):
                message.num_blocks = message.max_model_len = 100_000
                member = Membership(
                    self._channels, self._address, message, conductor_pb2.Load, BlockLog()
                )
                await stack.enter_async_context(running(member.run()))
                await member.registered.wait()
            yield

    async def close(self) -> None:
        await self._channels.close()


def view(rpc_address: str) -> directory_pb2.StoreNodeView:
    return directory_pb2.StoreNodeView(endpoint=common_pb2.Endpoint(rpc_address=rpc_address))


@pytest.mark.slow  # three processes start, and a replica has to cool down
async def test_a_hot_prefix_gains_a_replica_that_reads_back_and_loses_it_when_it_is_cold() -> None:
    port = free_port()
    limits = ("--ttft-slo", "10000", "--tbt-slo", "10000", "--metrics-port", str(port))
    with contextlib.ExitStack() as processes:
        address = processes.enter_context(
            running_conductor(*limits, "--replica-share", "1", "--replica-cool-s", str(COOL_S))
        )
        nodes = [
            processes.enter_context(
                running_node("--dram", "64MiB", "--conductor", address, instance_id=name)
            )
            for name in ("s0", "s1")
        ]
        first, second = (view(node.rpc_address) for node in nodes)
        conductor = Conductor(address)
        async with conductor.workers():
            keys = await put_chain(first, range(1, NUM_BLOCKS + 1))
            await until_indexed(conductor, s0=NUM_BLOCKS, s1=0)
            near = await until_near(conductor, keys)
            assert near["prefill"] == "p1"
            assert near["replica_blocks"] == NUM_BLOCKS
            async with running(
                keep_asking(conductor, keys)
            ):  # or it would be cold on a slow machine
                assert await read_chain(second, keys) == WANTED
            await conductor.forget_all()
            await until_indexed(conductor, s0=NUM_BLOCKS, s1=0)
            assert await read_chain(first, keys) == WANTED
            assert counted(port, "replicas_created_total") >= NUM_BLOCKS
            assert counted(port, "replicas_dropped_total") >= NUM_BLOCKS
        await conductor.close()


async def until_indexed(conductor: Conductor, **blocks: int) -> None:
    async def as_wanted() -> bool:
        found = await conductor.indexed()
        return all(found.get(name) == count for name, count in blocks.items())

    await answered(as_wanted)


async def until_near(conductor: Conductor, keys: Sequence[BlockKey]) -> dict[str, object]:
    """Asks for the prefix until a placement reads all of it from the second store; the record of that decision."""
    while True:
        decision = await conductor.place(keys)
        if decision["sources"] == [["s1", 0, NUM_BLOCKS]]:
            return decision
        await asyncio.sleep(0.02)


async def keep_asking(conductor: Conductor, keys: Sequence[BlockKey]) -> None:
    while True:
        await conductor.place(keys)
        await asyncio.sleep(0.1)


def counted(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as reply:
        return metric(reply.read().decode(), f"moonserve_conductor_{name}")
