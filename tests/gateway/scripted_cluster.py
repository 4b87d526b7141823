"""A conductor and workers that speak the real protocol and do what a test tells them.

Every submission is answered with the next tokens of `tokens` (by index, so that a continued request goes on where it
stopped) unless the test gives a script. What the gateway said is recorded, and can be waited for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio

from protocol.errors import MoonserveError
from protocol.ids import GatewayId, RequestId
from protocol.keys import unpack_tokens
from protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, worker_pb2, worker_pb2_grpc
from protocol.prompt_logprobs import PromptLogprobs
from protocol.request import FinishReason, Logprobs, PrefillReport, Token, finish_reason
from protocol.rpc import RpcServer
from protocol.streams import GatewayStreams
from protocol.wire import sampling_from_wire
from tests.patience import PATIENCE_S
from tests.scores import scores_of

Context = grpc.aio.ServicerContext

CLUSTER_TOKEN = "test-token"
MAX_MODEL_LEN = 512
BLOCK_SIZE = 32


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """One worker process, as far as a gateway can tell."""

    def __init__(self, cluster: ScriptedCluster, instance_id: str, role: common_pb2.Role) -> None:
        self._cluster = cluster
        self.instance_id = instance_id
        self.role = role
        self.lost_gateways: list[str] = []
        self.streams = GatewayStreams(self.lost_gateways.append, grace_s=60.0)
        self.server = RpcServer(CLUSTER_TOKEN)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self.server.grpc)
        self.server.add_lean("Worker", self)
        self.rpc_address = ""
        self.epoch = 1

    async def start(self) -> None:
        self.rpc_address = await self.server.start("127.0.0.1", 0)

    async def kill(self) -> None:
        """Ends all calls at once, as a dead process does."""
        await self.server.stop(0)

    @property
    def endpoint(self) -> common_pb2.Endpoint:
        return common_pb2.Endpoint(
            instance_id=self.instance_id, epoch=self.epoch, rpc_address=self.rpc_address, host="here"
        )

    async def Submit(self, request: worker_pb2.SubmitRequest, context: Context) -> worker_pb2.SubmitReply:
        self._cluster.submitted(self, request)
        return worker_pb2.SubmitReply()

    async def Cancel(self, request: worker_pb2.CancelRequest, context: Context) -> worker_pb2.CancelReply:
        self._cluster.cancels.append((self.instance_id, request.request_id))
        self._cluster.changed()
        return worker_pb2.CancelReply()

    async def Events(self, request: worker_pb2.EventsRequest, context: Context) -> AsyncIterator[worker_pb2.EventBatch]:
        async for batch in self.streams.events(GatewayId(request.gateway_id)):
            yield batch


@dataclass(kw_only=True)
class Run:
    """One submission, in the hands of a script."""

    cluster: ScriptedCluster
    message: worker_pb2.SubmitRequest
    prefill: ScriptedWorker
    decode: ScriptedWorker

    @property
    def first_index(self) -> int:
        return len(unpack_tokens(self.message.token_ids)) - self.message.num_prompt_tokens

    @property
    def gateway_id(self) -> GatewayId:
        return GatewayId(self.message.gateway_id)

    def token(self, index: int, token_id: int, *, last: bool = False) -> Token:
        sampling = sampling_from_wire(self.message.sampling)
        reason = finish_reason(sampling, index, token_id)
        if last and reason is None:
            reason = FinishReason.LENGTH
        wants = sampling.num_logprobs
        logprobs = None
        if wants is not None:
            top = tuple((token_id + place, -0.25 - place) for place in range(wants))
            logprobs = Logprobs(sampled=-0.25, top=top)
        return Token(
            request_id=RequestId(self.message.request_id),
            index=index,
            token_id=token_id,
            logprobs=logprobs,
            finish_reason=reason,
        )

    def prefill_done(self, token_id: int, *, cached_tokens: int = 0) -> Token:
        """The first token of this attempt, with the report."""
        token = self.token(self.first_index, token_id)
        report = PrefillReport(
            request_id=token.request_id,
            cached_tokens=cached_tokens,
            queue_s=0.01,
            load_s=0.02,
            compute_s=0.03,
            prompt_logprobs=self._prompt_logprobs(),
        )
        self.prefill.streams.send(self.gateway_id, tokens=[token], prefills=[report])
        return token

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        num_top = sampling_from_wire(self.message.sampling).num_prompt_logprobs
        if num_top is None or self.first_index:
            return None
        return scores_of(range(1, self.message.num_prompt_tokens), num_top)

    def decoded(self, *tokens: Token) -> None:
        """Tokens from the decode worker, as one batch."""
        self.decode.streams.send(self.gateway_id, tokens=tokens)

    def fail(self, error: MoonserveError, by: ScriptedWorker) -> None:
        by.streams.send(self.gateway_id, failures=[(RequestId(self.message.request_id), error)])

    def play(self, token_ids: Sequence[int], *, cached_tokens: int = 0) -> None:
        """The rest of `token_ids` (the whole output, by index), until a finish reason."""
        start = self.first_index
        token = self.prefill_done(token_ids[start], cached_tokens=cached_tokens)
        for index in range(start + 1, len(token_ids)):
            if token.finish_reason is not None:
                return
            token = self.token(index, token_ids[index])
            self.decoded(token)


Script = Callable[[Run], Awaitable[None]]


@dataclass(kw_only=True)
class ScriptedCluster(conductor_pb2_grpc.ConductorServicer):
    """Conductor and workers on loopback."""

    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    scripts: list[Script] = field(default_factory=list)  # one per submission; then the default
    place_replies: list[conductor_pb2.PlaceReply] = field(default_factory=list)  # then placements

    workers: dict[str, ScriptedWorker] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    last_heard_s: dict[str, float] = field(default_factory=dict)  # 0 where not given
    places: list[conductor_pb2.PlaceRequest] = field(default_factory=list)
    submissions: list[worker_pb2.SubmitRequest] = field(default_factory=list)
    cancels: list[tuple[str, str]] = field(default_factory=list)
    reports: list[conductor_pb2.ReportRequest] = field(default_factory=list)
    address: str = ""
    max_model_len: int = MAX_MODEL_LEN
    place_gate: asyncio.Event | None = None  # placements wait for it
    first_token_gate: asyncio.Event | None = None  # reports of first tokens wait for it

    async def start(self, *, num_prefill: int = 2, num_decode: int = 2) -> None:
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self.server = RpcServer(CLUSTER_TOKEN)
        conductor_pb2_grpc.add_ConductorServicer_to_server(self, self.server.grpc)
        self.server.add_lean("Conductor", self)
        self.address = await self.server.start("127.0.0.1", 0)
        for number in range(num_prefill):
            await self.add(f"prefill-{number}", common_pb2.ROLE_PREFILL)
        for number in range(num_decode):
            await self.add(f"decode-{number}", common_pb2.ROLE_DECODE)

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self.workers.values():
            worker.streams.close()
            await worker.kill()
        await self.server.stop(0)

    async def kill(self, instance_id: str) -> None:
        """The process dies and the conductor notices."""
        self.dead.add(instance_id)
        await self.workers[instance_id].kill()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until what was recorded satisfies `condition`."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(condition)

    def changed(self) -> None:
        self._hold(self._notify())

    def submitted(self, prefill: ScriptedWorker, request: worker_pb2.SubmitRequest) -> None:
        self.submissions.append(request)
        decode = self.workers[request.placement.decode.instance_id]
        run = Run(cluster=self, message=request, prefill=prefill, decode=decode)
        self._hold(self._play(run))
        self.changed()

    async def _play(self, run: Run) -> None:
        if self.scripts:
            await self.scripts.pop(0)(run)
        else:
            run.play(self.tokens, cached_tokens=self.cached_tokens)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _hold(self, coroutine: Awaitable[None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def add(self, instance_id: str, role: common_pb2.Role, *, epoch: int = 1) -> None:
        worker = ScriptedWorker(self, instance_id, role)
        worker.epoch = epoch
        await worker.start()
        self.workers[instance_id] = worker

    def _alive(self, role: common_pb2.Role) -> list[ScriptedWorker]:
        return [
            worker for worker in self.workers.values() if worker.role == role and worker.instance_id not in self.dead
        ]

    # The conductor

    async def GetCluster(self, request: conductor_pb2.GetClusterRequest, context: Context) -> conductor_pb2.ClusterView:
        alive = [w for w in self.workers.values() if w.instance_id not in self.dead]
        has_both = all(self._alive(role) for role in (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE))
        return conductor_pb2.ClusterView(
            instances=[
                conductor_pb2.InstanceView(
                    endpoint=w.endpoint,
                    role=w.role,
                    num_blocks=64,
                    last_heard_s=self.last_heard_s.get(w.instance_id, 0.0),
                )
                for w in reversed(alive)  # in whatever order they joined
            ],
            layout=common_pb2.KvLayout(
                num_layers=1, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=64, dtype="float32"
            ),
            fingerprint="f00d",
            max_model_len=self.max_model_len,
            ready=has_both,
        )

    async def Place(self, request: conductor_pb2.PlaceRequest, context: Context) -> conductor_pb2.PlaceReply:
        self.places.append(request)
        self.changed()
        if self.place_gate is not None:
            await self.place_gate.wait()
        if self.place_replies:
            return self.place_replies.pop(0)
        chosen = [
            next((w for w in self._alive(role) if w.instance_id not in request.excluded_instances), None)
            for role in (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE)
        ]
        if None in chosen:
            return conductor_pb2.PlaceReply(failure=common_pb2.Failure(code="no_worker", message="no worker is alive"))
        return conductor_pb2.PlaceReply(
            placement=common_pb2.Placement(
                request_id=request.request_id, prefill=chosen[0].endpoint, decode=chosen[1].endpoint
            )
        )

    async def Report(self, request: conductor_pb2.ReportRequest, context: Context) -> conductor_pb2.ReportReply:
        if self.first_token_gate is not None and request.phase == request.PHASE_FIRST_TOKEN:
            await self.first_token_gate.wait()
        self.reports.append(request)
        self.changed()
        return conductor_pb2.ReportReply()

    async def Explain(self, request: conductor_pb2.ExplainRequest, context: Context) -> conductor_pb2.ExplainReply:
        asked = request.request_id
        by_id = [place for place in self.places if place.request_id == asked]
        named = [place for place in self.places if place.client_id == asked]
        found = by_id or named[-1:]
        decision = {"because": "scripted", "turn": {"tenant": found[0].tenant}} if found else {}
        decision["request_id"] = found[0].request_id if found else asked
        return conductor_pb2.ExplainReply(found=bool(found), decision_json=json.dumps(decision), max_decisions=4096)
