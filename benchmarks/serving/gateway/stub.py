"""A cluster without a model: a conductor and two workers that speak the real protocol and always send the same token.

Requests wait until the benchmark calls `run`. Then every step is one message with one token for each request, as from a
decode worker. The time just before each step's message is sent is recorded; the rest of the latency that a client sees
is added on the way. Everything runs in the caller's event loop.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from typing import Any

# Set before grpc is imported: uvloop forks while gRPC has threads, and with gRPC's fork handlers one client process in
# thirty never reported back.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from moonserve.protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, worker_pb2, worker_pb2_grpc
from moonserve.protocol.rpc.grpc_transport import RpcServer
from moonserve.worker.token_streams import KEEPALIVE_S

CLUSTER_TOKEN = "benchmark"
MAX_MODEL_LEN = 1_000_000
_LAYOUT = common_pb2.KvLayout(num_layers=1, block_size=32, num_kv_heads=1, head_dim=64, dtype="float32")


class StubCluster(conductor_pb2_grpc.ConductorServicer):
    """Conductor that places every request at once on the only pair of workers."""

    def __init__(self, token_id: int) -> None:
        """`token_id`: the token of every stream."""
        self._token_id = token_id
        self._conductor = RpcServer(CLUSTER_TOKEN)
        self._workers = {  # gateways call no other methods
            "prefill-0": StubWorker(common_pb2.ROLE_PREFILL),
            "decode-0": StubWorker(common_pb2.ROLE_DECODE),
        }
        self.address = ""
        self.sent_at: list[float] = []  # time.monotonic() of each step of the latest `run`

    async def start(self) -> None:
        conductor_pb2_grpc.add_ConductorServicer_to_server(self, self._conductor.grpc)
        for instance_id, worker in self._workers.items():
            await worker.start(instance_id)
        self.address = await self._conductor.start("127.0.0.1", 0)

    async def stop(self) -> None:
        for worker in self._workers.values():
            await worker.server.stop(0)
        await self._conductor.stop(0)

    @property
    def waiting(self) -> list[str]:
        """Requests submitted since the latest `run`."""
        return self._workers["prefill-0"].submitted

    async def gather(self, num_requests: int) -> None:
        """Waits until `num_requests` requests are submitted."""
        changed = self._workers["prefill-0"].changed
        while len(self.waiting) < num_requests:
            changed.clear()
            await changed.wait()

    async def run(self, num_steps: int, interval_s: float, *, ends: bool = True) -> None:
        """Sends each waiting request `num_steps` tokens, one step every `interval_s` (0 = as fast as the stream accepts
        them). With `ends`, the last token finishes the request."""
        requests, decode = list(self.waiting), self._workers["decode-0"]
        self.waiting.clear()
        self.sent_at = []
        begun_at = time.monotonic()
        for step in range(num_steps):
            batch = self._step(requests, step, is_last=ends and step == num_steps - 1)
            if interval_s:
                await asyncio.sleep(max(0.0, begun_at + step * interval_s - time.monotonic()))
            self.sent_at.append(time.monotonic())
            await decode.send(batch)

    def _step(self, requests: list[str], index: int, *, is_last: bool) -> worker_pb2.EventBatch:
        reason = common_pb2.FINISH_REASON_LENGTH if is_last else 0
        batch = worker_pb2.EventBatch()
        for request_id in requests:
            batch.tokens.add(request_id=request_id, index=index, token_id=self._token_id, finish_reason=reason)
        return batch

    # RPCs of the conductor

    async def GetCluster(self, request: conductor_pb2.GetClusterRequest, context: Any) -> conductor_pb2.ClusterView:
        instances = [
            conductor_pb2.InstanceView(endpoint=worker.endpoint, role=worker.role, num_blocks=64)
            for worker in self._workers.values()
        ]
        return conductor_pb2.ClusterView(
            instances=instances,
            layout=_LAYOUT,
            fingerprint="stub",
            max_model_len=MAX_MODEL_LEN,
            ready=True,
        )

    async def Place(self, request: conductor_pb2.PlaceRequest, context: Any) -> conductor_pb2.PlaceReply:
        placement = common_pb2.Placement(
            request_id=request.request_id,
            prefill=self._workers["prefill-0"].endpoint,
            decode=self._workers["decode-0"].endpoint,
        )
        return conductor_pb2.PlaceReply(placement=placement)

    async def Report(self, request: conductor_pb2.ReportRequest, context: Any) -> conductor_pb2.ReportReply:
        return conductor_pb2.ReportReply()


class StubWorker(worker_pb2_grpc.WorkerServicer):
    """Worker that records submissions and sends queued batches on the gateway's event stream."""

    def __init__(self, role: common_pb2.Role.ValueType) -> None:
        self.role = role
        self.server = RpcServer(CLUSTER_TOKEN)
        self.endpoint = common_pb2.Endpoint()
        self.submitted: list[str] = []
        self.changed = asyncio.Event()
        self._outgoing: asyncio.Queue[worker_pb2.EventBatch] = asyncio.Queue(1)

    async def start(self, instance_id: str) -> None:
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self.server.grpc)
        self.server.add_socket_service("Worker", self)
        address = await self.server.start("127.0.0.1", 0)
        self.endpoint = common_pb2.Endpoint(instance_id=instance_id, epoch=1, rpc_address=address, host="here")

    async def send(self, batch: worker_pb2.EventBatch) -> None:
        """Queues a batch; waits while the gateway's stream applies backpressure."""
        await self._outgoing.put(batch)

    async def Submit(self, request: worker_pb2.SubmitRequest, context: Any) -> worker_pb2.SubmitReply:
        self.submitted.append(request.request_id)
        self.changed.set()
        return worker_pb2.SubmitReply()

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Any) -> worker_pb2.WorkerStatus:
        return worker_pb2.WorkerStatus()

    async def GetSteps(self, request: worker_pb2.GetStepsRequest, context: Any) -> worker_pb2.StepLog:
        return worker_pb2.StepLog()

    async def Cancel(self, request: worker_pb2.CancelRequest, context: Any) -> worker_pb2.CancelReply:
        return worker_pb2.CancelReply()

    async def Events(self, request: worker_pb2.EventsRequest, context: Any) -> AsyncIterator[worker_pb2.EventBatch]:
        yield worker_pb2.EventBatch()
        while True:
            yield await self._next()

    async def _next(self) -> worker_pb2.EventBatch:
        """Returns the next batch to send, or an empty one as a sign of life."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEEPALIVE_S):
                return await self._outgoing.get()
        return worker_pb2.EventBatch()
