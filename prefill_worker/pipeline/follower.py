"""A follower from start to stop: its layers, its memory, its listener. It ends with its leader."""

from __future__ import annotations

from engine.replica import Replica, loaded_replica
from prefill_worker.config import PrefillConfig
from prefill_worker.landing import KvMemory
from prefill_worker.pipeline.config import FollowerConfig
from prefill_worker.pipeline.hidden import HiddenOutbox
from prefill_worker.pipeline.servicer import StageServicer
from prefill_worker.pipeline.stage import OwnStage
from prefill_worker.sending import Sender
from protocol.layout import DTYPE_BYTES
from protocol.pb import pipeline_pb2
from protocol.process import Lifecycle
from protocol.rpc import RpcServer
from transfer import Segment, TransferEngine
from transfer.serving import serving

STOP_GRACE_S = 0.5


async def serve(config: FollowerConfig, lifecycle: Lifecycle) -> None:
    """Runs one stage until the process is told to stop. Raises ConfigError when it cannot start."""
    rank, size = config.pipeline_rank, config.pipeline_parallel_size
    with serving(config, config.faults()) as (transfer, _):
        async with loaded_replica(
            config, transfer.allocate, lifecycle, rank=rank, num_stages=size
        ) as (replica, segment):
            servicer = make_servicer(config, replica, transfer, segment)
            await _run(config, servicer, lifecycle)


async def _run(config: FollowerConfig, servicer: StageServicer, lifecycle: Lifecycle) -> None:
    server = RpcServer(config.cluster_token, config.tls())
    server.add_lean("PipelineStage", servicer)
    address = await server.start(config.host, config.port)
    try:
        lifecycle.ready(rpc=address, lean=server.lean_address)
        await lifecycle.until_stopped()
    finally:
        await server.stop(STOP_GRACE_S)


def make_servicer(
    config: FollowerConfig, replica: Replica, transfer: TransferEngine, segment: Segment
) -> StageServicer:
    """The stage behind its calls."""
    patience = config.transfer_patience()
    sender = Sender(transfer, patience)
    outbox = None if replica.plan.stage.is_last else make_outbox(config, replica, transfer)
    stage = OwnStage(replica.thread, own_memory(replica, segment), sender.submit, outbox=outbox)
    return StageServicer(
        stage, transfer, facts=facts_of(replica), row_bytes=row_bytes(replica), patience=patience
    )


def make_outbox(config: PrefillConfig, replica: Replica, transfer: TransferEngine) -> HiddenOutbox:
    """For the steps that can be under way at once."""
    return HiddenOutbox(
        transfer,
        row_bytes=row_bytes(replica),
        slot_rows=config.limits(replica.plan).max_num_batched_tokens,
        num_slots=replica.plan.stage.size,
    )


def facts_of(replica: Replica) -> pipeline_pb2.StageJoinReply:
    """What the stages of a group must agree in, and which one it is."""
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
    """Of one token's hidden states."""
    engine = replica.thread.engine
    return engine.config.hidden_size * DTYPE_BYTES[replica.plan.dtype]


def own_memory(replica: Replica, segment: Segment) -> KvMemory:
    """A stage's pool, and where its layers lie in others'."""
    plan = replica.plan
    return KvMemory(
        segment, plan.own_layout, plan.num_blocks, first_piece=2 * plan.stage.layers.start
    )
