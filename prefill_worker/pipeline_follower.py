"""The process of a follower stage: its layers, its memory and its RPC server. It ends with its leader."""

from dataclasses import dataclass, fields, replace

from moonserve.engine.replica import Replica, running_replica
from moonserve.prefill_worker.config import PrefillConfig
from moonserve.prefill_worker.kv_writes import KvSender
from moonserve.prefill_worker.pipeline_stage import (
    STEP_TIMEOUT_S,
    HiddenInbox,
    HiddenOutbox,
    StageExecutor,
    StageStep,
    done_to_wire,
    plan_from_wire,
    send_from_wire,
)
from moonserve.protocol.errors import ConfigError, InvalidRequest, MoonserveError
from moonserve.protocol.kv_blocks import DTYPE_BYTES
from moonserve.protocol.pb import pipeline_pb2, pipeline_pb2_grpc
from moonserve.protocol.process.config import option
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.rpc.grpc_transport import Context, RpcServer
from moonserve.protocol.rpc.wire import failure_to_wire
from moonserve.transfer import Segment, TransferEngine
from moonserve.transfer.config import TransferTimeout
from moonserve.transfer.metrics import engine_with_metrics
from moonserve.worker.process import KvMemory


@dataclass(frozen=True, kw_only=True)
class FollowerConfig(PrefillConfig):
    """Configuration of a follower process, written by its leader."""

    pipeline_rank: int = option(help="number of this stage, from 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.pipeline_rank < self.pipeline_parallel_size:
            raise ConfigError(
                f"--pipeline-rank {self.pipeline_rank} is none of the stages 1 to "
                f"{self.pipeline_parallel_size - 1} of --pipeline-parallel-size {self.pipeline_parallel_size}"
            )


def follower_config(leader: PrefillConfig, rank: int) -> FollowerConfig:
    """Returns the configuration of a follower of `leader`. A follower is not a member of the cluster and has no metrics
    port."""
    own = replace(
        leader,
        instance_id=f"{leader.instance_id}-stage-{rank}",
        port=0,
        conductor=None,
        metrics_port=0,
        status_fd=None,
        parent_pid=None,
    )
    values = {each.name: getattr(own, each.name) for each in fields(PrefillConfig)}
    return FollowerConfig(**values, pipeline_rank=rank)


class StageServicer(pipeline_pb2_grpc.PipelineStageServicer):
    """Serves `PipelineStage` to one leader. `facts` is the reply to Join without the source of hidden states."""

    def __init__(
        self,
        stage: StageExecutor,
        transfer: TransferEngine,
        *,
        facts: pipeline_pb2.StageJoinReply,
        row_bytes: int,
        patience: TransferTimeout,
    ) -> None:
        """`row_bytes` is the size of one token's hidden states."""
        self._stage = stage
        self._transfer = transfer
        self._facts = facts
        self._row_bytes = row_bytes
        self._patience = patience
        self._last_step = 0
        self._unfinished: dict[int, StageStep] = {}

    async def Join(self, request: pipeline_pb2.StageJoinRequest, context: Context) -> pipeline_pb2.StageJoinReply:
        self._stage.inbox = HiddenInbox(
            self._transfer,
            request.previous,
            row_bytes=self._row_bytes,
            patience=self._patience,
            longest_wait_s=STEP_TIMEOUT_S,
        )
        reply = pipeline_pb2.StageJoinReply()
        reply.CopyFrom(self._facts)
        if self._stage.outbox is not None:
            reply.hidden.CopyFrom(self._stage.outbox.source)
        return reply

    async def RunStep(self, request: pipeline_pb2.StageStepRequest, context: Context) -> pipeline_pb2.StageStepReply:
        """Computes this stage's share of a step. Raises InvalidRequest unless its number is higher than all before,
        since a later step's KV may depend on it."""
        if request.step <= self._last_step:
            raise InvalidRequest(f"step {request.step} came after step {self._last_step}")
        self._last_step = request.step
        plans = [plan_from_wire(message) for message in request.slices]
        step = self._stage.begin(plans, step=request.step)
        if any(plan.landing is not None for plan in plans):
            self._unfinished[request.step] = step
        sampled = await step.compute()
        is_last = self._stage.outbox is None
        reply = done_to_wire(plans, sampled, step.checksums(), is_last=is_last)
        step.finish()
        return reply

    async def FinishStep(
        self, request: pipeline_pb2.StageFinishRequest, context: Context
    ) -> pipeline_pb2.StageFinishReply:
        reply = pipeline_pb2.StageFinishReply()
        step = self._unfinished.pop(request.step, None)
        if step is None:  # the step sent nothing, or never reached this stage
            return reply
        for position in range(step.num_slices):
            try:
                await step.wait_until_sent(position)
            except MoonserveError as error:
                reply.failures[position].CopyFrom(failure_to_wire(error))
        return reply

    async def SendBlocks(self, request: pipeline_pb2.StageSendRequest, context: Context) -> pipeline_pb2.StageSendReply:
        await self._stage.send_blocks(send_from_wire(request))
        return pipeline_pb2.StageSendReply()


STOP_GRACE_S = 0.5


async def serve(config: FollowerConfig, lifecycle: Lifecycle) -> None:
    """Runs one stage until the process is requested to stop. Raises ConfigError if it cannot start."""
    rank, size = config.pipeline_rank, config.pipeline_parallel_size
    with engine_with_metrics(config, config.faults()) as (transfer, _):
        async with running_replica(config, transfer.allocate, lifecycle, rank=rank, num_stages=size) as (
            replica,
            segment,
        ):
            await _run(config, make_servicer(config, replica, transfer, segment), lifecycle)


async def _run(config: FollowerConfig, servicer: StageServicer, lifecycle: Lifecycle) -> None:
    server = RpcServer(config.cluster_token, config.tls())
    server.add_socket_service("PipelineStage", servicer)
    async with server.serving(config.host, config.port, STOP_GRACE_S) as address:
        lifecycle.ready(rpc=address, lean=server.lean_address)
        await lifecycle.wait_for_stop()


def make_servicer(
    config: FollowerConfig, replica: Replica, transfer: TransferEngine, segment: Segment
) -> StageServicer:
    """Returns the servicer of a stage over a loaded replica."""
    patience = config.transfer_timeout()
    sender = KvSender(transfer, patience)
    outbox = None if replica.plan.stage.is_last else make_outbox(config, replica, transfer)
    stage = StageExecutor(replica.thread, stage_memory(replica, segment), sender.submit, outbox=outbox)
    return StageServicer(
        stage, transfer, facts=stage_properties(replica), row_bytes=row_bytes(replica), patience=patience
    )


def make_outbox(config: PrefillConfig, replica: Replica, transfer: TransferEngine) -> HiddenOutbox:
    """Returns an outbox with one slot per stage, the number of steps that can be in flight."""
    return HiddenOutbox(
        transfer,
        row_bytes=row_bytes(replica),
        slot_rows=config.limits(replica.plan).max_num_batched_tokens,
        num_slots=replica.plan.stage.size,
    )


def stage_properties(replica: Replica) -> pipeline_pb2.StageJoinReply:
    """Returns a stage's rank and the properties that must be equal in all stages of a group."""
    engine, plan = replica.thread.engine, replica.plan
    return pipeline_pb2.StageJoinReply(
        rank=plan.stage.rank,
        size=plan.stage.size,
        fingerprint=engine.fingerprint,
        kernels=engine.kernels_name,
        attention=engine.attention_name,
        num_blocks=plan.num_blocks,
    )


def row_bytes(replica: Replica) -> int:
    """Returns the size of one token's hidden states."""
    return replica.thread.engine.config.hidden_size * DTYPE_BYTES[replica.plan.dtype]


def stage_memory(replica: Replica, segment: Segment) -> KvMemory:
    """Returns a stage's pool with the position of its layers in a pool of all layers."""
    plan = replica.plan
    return KvMemory(segment, plan.own_layout, plan.num_blocks, first_piece=2 * plan.stage.layers.start)
