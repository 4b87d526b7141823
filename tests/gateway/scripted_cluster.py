"""Conductor and workers that speak the real protocol and follow a test's script.

Every submission is answered with the next tokens of `tokens`, by index, so that a continued request resumes where it
stopped. A test can supply a script instead. Everything that the gateway sends is recorded and can be waited for.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from moonserve.gateway.text.tokenizer import Tokenizer
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.kv_blocks import unpack_tokens
from moonserve.protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, worker_pb2, worker_pb2_grpc
from moonserve.protocol.process.event_loop import BackgroundTasks
from moonserve.protocol.request import GatewayId, Logprobs, PrefillReport, RequestId, Token, finish_reason
from moonserve.protocol.rpc.grpc_transport import RpcServer
from moonserve.protocol.rpc.wire import sampling_from_wire
from moonserve.worker.token_streams import GatewayStreams
from tests.patience import PATIENCE_S
from tests.scores import scores_of

Context = grpc.aio.ServicerContext
PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE

CLUSTER_TOKEN = "test-token"
MAX_MODEL_LEN = 512
BLOCK_SIZE = 32
END_OF_TURN = 4


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """Worker process, as seen by a gateway."""

    def __init__(self, cluster: "ScriptedCluster", instance_id: str, role: common_pb2.Role, epoch: int) -> None:
        self._cluster = cluster
        self.role = role
        self.endpoint = common_pb2.Endpoint(instance_id=instance_id, epoch=epoch, host="here")
        self.streams = GatewayStreams(lambda gateway_id: None, grace_s=60.0)
        self.server = RpcServer(CLUSTER_TOKEN)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self.server.grpc)
        self.server.add_socket_service("Worker", self)

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Context) -> worker_pb2.WorkerStatus:
        return worker_pb2.WorkerStatus()

    async def Submit(self, request: worker_pb2.SubmitRequest, context: Context) -> worker_pb2.SubmitReply:
        self._cluster.submitted(self, request)
        return worker_pb2.SubmitReply()

    async def Cancel(self, request: worker_pb2.CancelRequest, context: Context) -> worker_pb2.CancelReply:
        self._cluster.cancels.append((self.endpoint.instance_id, request.request_id))
        self._cluster.changed.set()
        return worker_pb2.CancelReply()

    async def Events(self, request: worker_pb2.EventsRequest, context: Context) -> AsyncIterator[worker_pb2.EventBatch]:
        async for batch in self.streams.events(GatewayId(request.gateway_id)):
            yield batch


@dataclass(kw_only=True)
class Run:
    """One submission, driven by a script."""

    cluster: "ScriptedCluster"
    message: worker_pb2.SubmitRequest
    prefill: ScriptedWorker
    decode: ScriptedWorker

    @property
    def first_index(self) -> int:
        return len(unpack_tokens(self.message.token_ids)) - self.message.num_prompt_tokens

    def send(self, worker: ScriptedWorker, **events: Any) -> None:
        worker.streams.send(GatewayId(self.message.gateway_id), **events)

    def token(self, index: int, token_id: int | None = None) -> Token:
        """Returns the token at this index of the output: the given id, or else the cluster's token."""
        token_id = self.cluster.tokens[index] if token_id is None else token_id
        sampling = sampling_from_wire(self.message.sampling)
        logprobs = None
        if sampling.num_logprobs is not None:
            top = tuple((token_id + place, -0.25 - place) for place in range(sampling.num_logprobs))
            logprobs = Logprobs(sampled=-0.25, top=top)
        reason = finish_reason(sampling, index, token_id)
        request_id = RequestId(self.message.request_id)
        return Token(request_id=request_id, index=index, token_id=token_id, logprobs=logprobs, finish_reason=reason)

    def prefill_done(self) -> Token:
        """Sends and returns the first token of this attempt, together with the prefill worker's report."""
        token = self.token(self.first_index)
        num_top = sampling_from_wire(self.message.sampling).num_prompt_logprobs
        is_scored = num_top is not None and not self.first_index
        scores = scores_of(range(1, self.message.num_prompt_tokens), num_top) if is_scored else None
        seconds = {"queue_s": 0.01, "load_s": 0.02, "compute_s": 0.03}
        cached_tokens = self.cluster.cached_tokens
        report = PrefillReport(
            request_id=token.request_id, cached_tokens=cached_tokens, prompt_logprobs=scores, **seconds
        )
        self.send(self.prefill, tokens=[token], prefills=[report])
        return token

    def decoded(self, *tokens: Token) -> None:
        """Sends tokens from the decode worker in one batch."""
        self.send(self.decode, tokens=tokens)

    def fail(self, error: MoonserveError, by: ScriptedWorker) -> None:
        self.send(by, failures=[(RequestId(self.message.request_id), error)])

    def play(self) -> None:
        """Sends the remaining tokens of the cluster until one has a finish reason."""
        token = self.prefill_done()
        while token.finish_reason is None:
            token = self.token(token.index + 1)
            self.decoded(token)


Script = Callable[[Run], Awaitable[None]]


async def begins(run: Run) -> None:
    """Script that sends the first token and nothing else."""
    run.prefill_done()


def failing(error: MoonserveError) -> Script:
    """Returns a script in which the prefill worker fails the request."""

    async def fails(run: Run) -> None:
        run.fail(error, by=run.prefill)

    return fails


@dataclass(kw_only=True)
class ScriptedCluster(conductor_pb2_grpc.ConductorServicer):
    """Conductor and workers on loopback."""

    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    scripts: list[Script] = field(default_factory=list)  # one per submission; then the default script
    place_replies: list[conductor_pb2.PlaceReply] = field(default_factory=list)  # returned first; then real placements

    workers: dict[str, ScriptedWorker] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    last_heard_s: dict[str, float] = field(default_factory=dict)  # 0 if absent
    places: list[conductor_pb2.PlaceRequest] = field(default_factory=list)
    submissions: list[worker_pb2.SubmitRequest] = field(default_factory=list)
    cancels: list[tuple[str, str]] = field(default_factory=list)
    reports: list[conductor_pb2.ReportRequest] = field(default_factory=list)
    address: str = ""
    max_model_len: int = MAX_MODEL_LEN
    place_gate: asyncio.Event | None = None  # placements wait for it
    first_token_gate: asyncio.Event | None = None  # reports of first tokens wait for it

    def answer_with(self, text: str, tokenizer: Tokenizer) -> None:
        """Makes the text and the demo model's end of turn the cluster's tokens."""
        self.tokens = [*tokenizer.encode(text, add_special_tokens=False), END_OF_TURN]

    async def start(self) -> None:
        """Starts the conductor and two workers of each role."""
        self.changed = asyncio.Event()
        self._tasks = BackgroundTasks()
        self.server = RpcServer(CLUSTER_TOKEN)
        conductor_pb2_grpc.add_ConductorServicer_to_server(self, self.server.grpc)
        self.server.add_socket_service("Conductor", self)
        self.address = await self.server.start("127.0.0.1", 0)
        for role, name in (PREFILL, "prefill"), (DECODE, "decode"):
            for number in range(2):
                await self.add(f"{name}-{number}", role)

    async def add(self, instance_id: str, role: common_pb2.Role, *, epoch: int = 1) -> None:
        worker = ScriptedWorker(self, instance_id, role, epoch)
        worker.endpoint.rpc_address = await worker.server.start("127.0.0.1", 0)
        self.workers[instance_id] = worker

    async def stop(self) -> None:
        await self._tasks.cancel()
        for worker in self.workers.values():
            worker.streams.close()
            await worker.server.stop(0)
        await self.server.stop(0)

    async def kill(self, instance_id: str) -> None:
        """Ends all calls to the worker at once, as when its process dies, and removes it from the conductor's view."""
        self.dead.add(instance_id)
        await self.workers[instance_id].server.stop(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until the recorded data satisfies `condition`."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def submitted(self, prefill: ScriptedWorker, request: worker_pb2.SubmitRequest) -> None:
        self.submissions.append(request)
        decode = self.workers[request.placement.decode.instance_id]
        self._tasks.start(self._play(Run(cluster=self, message=request, prefill=prefill, decode=decode)))
        self.changed.set()

    async def _play(self, run: Run) -> None:
        if self.scripts:
            await self.scripts.pop(0)(run)
        else:
            run.play()

    def _alive(self) -> list[ScriptedWorker]:
        return [worker for name, worker in self.workers.items() if name not in self.dead]

    # The conductor

    async def GetCluster(self, request: conductor_pb2.GetClusterRequest, context: Context) -> conductor_pb2.ClusterView:
        alive = self._alive()
        instances = [
            conductor_pb2.InstanceView(
                endpoint=w.endpoint,
                role=w.role,
                num_blocks=64,
                last_heard_s=self.last_heard_s.get(w.endpoint.instance_id, 0.0),
            )
            for w in reversed(alive)  # any order: workers join in no fixed order
        ]
        layout = {"num_layers": 1, "block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_dim": 64, "dtype": "float32"}
        return conductor_pb2.ClusterView(
            instances=instances,
            layout=common_pb2.KvLayout(**layout),
            fingerprint="f00d",
            max_model_len=self.max_model_len,
            ready={w.role for w in alive} == {PREFILL, DECODE},
        )

    async def Place(self, request: conductor_pb2.PlaceRequest, context: Context) -> conductor_pb2.PlaceReply:
        self.places.append(request)
        self.changed.set()
        if self.place_gate is not None:
            await self.place_gate.wait()
        if self.place_replies:
            return self.place_replies.pop(0)
        chosen: dict[common_pb2.Role, common_pb2.Endpoint] = {}
        for worker in self._alive():
            if worker.endpoint.instance_id not in request.excluded_instances:
                chosen.setdefault(worker.role, worker.endpoint)
        if len(chosen) < 2:
            return conductor_pb2.PlaceReply(failure=common_pb2.Failure(code="no_worker", message="no worker is alive"))
        ends = {"prefill": chosen[PREFILL], "decode": chosen[DECODE]}
        return conductor_pb2.PlaceReply(placement=common_pb2.Placement(request_id=request.request_id, **ends))

    async def Report(self, request: conductor_pb2.ReportRequest, context: Context) -> conductor_pb2.ReportReply:
        if self.first_token_gate is not None and request.phase == request.PHASE_FIRST_TOKEN:
            await self.first_token_gate.wait()
        self.reports.append(request)
        self.changed.set()
        return conductor_pb2.ReportReply()

    async def Explain(self, request: conductor_pb2.ExplainRequest, context: Context) -> conductor_pb2.ExplainReply:
        asked = request.request_id
        by_id = [place for place in self.places if place.request_id == asked]
        named = [place for place in self.places if place.client_id == asked]
        found = by_id or named[-1:]
        decision = {"because": "scripted", "turn": {"tenant": found[0].tenant}} if found else {}
        decision["request_id"] = found[0].request_id if found else asked
        return conductor_pb2.ExplainReply(found=bool(found), decision_json=json.dumps(decision), max_decisions=4096)
