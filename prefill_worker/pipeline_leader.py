"""The leader's side of a pipeline group: starts the followers, sends them each step, collects their results.

A group is several processes, each with a share of the layers, that prefill every prompt together. Chunked pipeline
parallelism (Mooncake, FAST'25 §4.2): while a chunk of a prompt is at one stage, the next chunk is at the stage before
it. So a long prompt's TTFT is little more than its computing time divided by the number of stages. The *leader* is
stage 0 and the prefill worker that the cluster knows; the *followers* run the leader's plans. Each stage keeps the KV
of its own layers and sends it to decode workers itself.

All stages receive a step when it begins, and each waits for the stage before it. While a step is at a later stage, the
next step is at an earlier one, so several steps in flight keep all stages busy. A stage has read its plan by the time
its input arrives. A group is whole or broken. If a follower fails to answer, its computing and its writes are
unknown, so every step fails from then on, and the worker ends and starts again.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from moonserve.engine.model.batch import Sampled
from moonserve.engine.replica import Replica
from moonserve.prefill_worker.config import PrefillConfig
from moonserve.prefill_worker.decisions.events import SendBlocks, SlicePlan
from moonserve.prefill_worker.kv_writes import KvSender
from moonserve.prefill_worker.pipeline_follower import follower_config, make_outbox, stage_memory, stage_properties
from moonserve.prefill_worker.pipeline_stage import (
    STEP_TIMEOUT_S,
    Checksums,
    StageExecutor,
    plan_to_wire,
    sampled_from_wire,
    send_to_wire,
)
from moonserve.protocol.errors import ConfigError, IntegrityError, MoonserveError, PeerError, PeerLost
from moonserve.protocol.kv_blocks import pack_checksums
from moonserve.protocol.pb import pipeline_pb2, pipeline_pb2_grpc
from moonserve.protocol.process.child_process import NotReady, WorkerPart, wait_for_first_exit
from moonserve.protocol.process.config import to_flags
from moonserve.protocol.process.event_loop import cancel_all
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.protocol.rpc.wire import failure_from_wire
from moonserve.transfer import Segment, TransferEngine

# Writes have deadlines of their own.
_WRITES_TIMEOUT_S = 300.0

T = TypeVar("T")


class FollowerClient:
    """Client for one stage behind the leader's."""

    def __init__(self, channels: Channels, address: str) -> None:
        self._channels = channels
        self._stub: pipeline_pb2_grpc.PipelineStageAsyncStub = pipeline_pb2_grpc.PipelineStageStub(channels.to(address))

    async def join(self, previous: pipeline_pb2.HiddenSource) -> pipeline_pb2.StageJoinReply:
        """Joins the stage to the group and returns its properties. `previous`: the source of its hidden states. Raises
        MoonserveError."""
        request = pipeline_pb2.StageJoinRequest(previous=previous)
        return await self._channels.call(self._stub.Join, request, timeout_s=STEP_TIMEOUT_S, wait_for_ready=True)

    async def run(self, step: int, plans: Sequence[SlicePlan]) -> tuple[list[Sampled | None], list[tuple[int, ...]]]:
        """Runs a step at the stage and returns what it sampled and, per slice, a checksum of the stage's layers of each
        complete block. Call it when the step begins at the first stage. Raises MoonserveError."""
        request = pipeline_pb2.StageStepRequest(step=step, slices=map(plan_to_wire, plans))
        reply = await self._channels.call(self._stub.RunStep, request, timeout_s=STEP_TIMEOUT_S)
        if [len(done.checksums) for done in reply.slices] != [len(plan.complete) for plan in plans]:
            raise PeerError(f"a pipeline stage answered step {step} with checksums of another step")
        sampled = [sampled_from_wire(done, plan) for done, plan in zip(reply.slices, plans, strict=True)]
        return sampled, [tuple(done.checksums) for done in reply.slices]

    async def finish(self, step: int) -> dict[int, MoonserveError]:
        """Waits for the stage's writes of a step. Returns their errors by slice position. Raises MoonserveError."""
        request = pipeline_pb2.StageFinishRequest(step=step)
        reply = await self._channels.call(self._stub.FinishStep, request, timeout_s=_WRITES_TIMEOUT_S)
        return {place: failure_from_wire(failure) for place, failure in reply.failures.items()}

    async def send_blocks(self, action: SendBlocks) -> None:
        """Sends the stage's layers of whole blocks. Raises MoonserveError."""
        await self._channels.call(self._stub.SendBlocks, send_to_wire(action), timeout_s=_WRITES_TIMEOUT_S)


class PipelineGroup:
    """The leader's stage and its followers, in order. `failed` gets an exception once the group is broken."""

    def __init__(self, own: StageExecutor, followers: Sequence[FollowerClient]) -> None:
        self.own = own
        self.followers = followers
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_steps = 0
        self._broken: PeerLost | None = None

    def begin(self, plans: Sequence[SlicePlan], on_prefix: Callable[[int], None] | None = None) -> "GroupStep":
        """Returns a new step. At most as many steps as stages may be in flight. `on_prefix` must be None, since a group
        loads no prefixes."""
        assert on_prefix is None, "a group does not load"
        self._num_steps += 1
        return GroupStep(self, self._num_steps, plans)

    async def send_blocks(self, action: SendBlocks) -> None:
        """Sends all stages' layers of whole blocks. On return no write is in flight. Raises the first error."""
        sends = [self.own.send_blocks(action)]
        sends += [self.answer_of(follower.send_blocks(action)) for follower in self.followers]
        await gather_all(sends)

    def raise_if_broken(self) -> None:
        """Raises PeerLost once the group is broken."""
        if self._broken is not None:
            raise PeerLost(self._broken.message)

    async def answer_of(self, call: Awaitable[T]) -> T:
        """Returns a follower's answer. Raises the follower's error, which breaks the group unless it is an
        IntegrityError."""
        try:
            return await call
        except IntegrityError:
            raise  # the follower's input was corrupt, and it did nothing
        except MoonserveError as error:
            self.break_group(error)
            raise

    def break_group(self, error: MoonserveError) -> None:
        """Marks the group as broken. The first error stays."""
        if self._broken is None:
            self._broken = PeerLost(f"a pipeline stage is lost: {error.message}")
            self._broken.__cause__ = error
            self.failed.set_exception(self._broken)


class GroupStep:
    """One step at all stages of a group."""

    def __init__(self, group: PipelineGroup, step: int, plans: Sequence[SlicePlan]) -> None:
        self._group = group
        self._step = step
        self._plans = plans
        self._own = group.own.begin(plans, step=step)
        self._finishing: list[asyncio.Task[dict[int, MoonserveError]]] = []
        self._sums: list[list[tuple[int, ...]]] = []

    async def compute(self) -> list[Sampled | None]:
        """Runs the step at all stages and returns what the last stage sampled. Raises an error of any stage."""
        group = self._group
        group.raise_if_broken()
        tasks = [
            asyncio.create_task(group.answer_of(follower.run(self._step, self._plans))) for follower in group.followers
        ]
        try:
            sampled = await self._own.compute()
            outcomes = await asyncio.gather(*tasks)
        except BaseException:
            await cancel_all(tasks)
            raise
        own = [tuple(checksum for _, checksum in sums) for sums in self._own.checksums()]
        self._sums = [own, *(checksums for _, checksums in outcomes)]
        return outcomes[-1][0] if outcomes else sampled

    def checksums(self) -> Checksums:
        """Returns the complete blocks' checksums, joined over all stages (`protocol.kv_blocks.pack_checksums`). Call
        after `compute`."""
        return [
            tuple(zip(plan.complete, map(pack_checksums, zip(*parts, strict=True)), strict=True))
            for plan, parts in zip(self._plans, zip(*self._sums, strict=True), strict=True)
        ]

    def is_sent(self, position: int) -> bool:
        """Returns True if the slice at `position` has a landing."""
        return self._own.is_sent(position)

    def finish(self) -> None:
        """Sends the remaining bytes of the own stage. Call after `compute`."""
        self._own.finish()

    async def wait_until_sent(self, position: int) -> None:
        """Waits until no stage has a write of the slice at `position` in flight. Raises the first error."""
        if not self._finishing:
            self._finishing = [
                asyncio.create_task(self._group.answer_of(follower.finish(self._step)))
                for follower in self._group.followers
            ]
        waits = [self._sent_by(task, position) for task in self._finishing]
        await gather_all([self._own.wait_until_sent(position), *waits])

    async def _sent_by(self, task: asyncio.Task[dict[int, MoonserveError]], position: int) -> None:
        failures = await asyncio.shield(task)  # other slices wait for it as well
        if position in failures:
            raise failures[position]


async def gather_all(works: Sequence[Awaitable[None]]) -> None:
    """Waits for all awaitables, even after one failed. Raises the first error."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome


_STOP_S = 5.0


class FollowerProcesses:
    """The follower processes of one leader, on its host. They load while the leader loads, and end with it."""

    def __init__(self, config: PrefillConfig, started: Sequence[WorkerPart]) -> None:
        self._config = config
        self._started = started
        self._channels = Channels(config.cluster_token, config.tls())

    async def join(self, replica: Replica, transfer: TransferEngine, segment: Segment) -> PipelineGroup:
        """Waits until all followers have loaded and returns the group. Raises ConfigError if one cannot start or
        differs from the leader."""
        addresses = await asyncio.gather(*(_lean_address(*each) for each in enumerate(self._started, start=1)))
        followers = [FollowerClient(self._channels, address) for address in addresses]
        outbox = make_outbox(self._config, replica, transfer)
        previous = outbox.source
        for rank, follower in enumerate(followers, start=1):
            reply = await follower.join(previous)
            _require_equal(reply, stage_properties(replica), rank)
            previous = reply.hidden
        own = StageExecutor(
            replica.thread,
            stage_memory(replica, segment),
            KvSender(transfer, self._config.transfer_timeout()).submit,
            outbox=outbox,
        )
        return PipelineGroup(own, followers)

    async def watch(self, group: PipelineGroup) -> None:
        """Breaks the group as soon as a follower process has ended."""
        await wait_for_first_exit(each.process for each in self._started)
        group.break_group(PeerLost("its process has ended"))

    async def stop(self) -> None:
        """Ends all follower processes."""
        await self._channels.close()
        await asyncio.gather(*(each.stop(_STOP_S) for each in self._started))


@contextlib.asynccontextmanager
async def start_followers(config: PrefillConfig) -> AsyncIterator[FollowerProcesses]:
    """Starts the follower processes, and ends them when the block is left."""
    started: list[WorkerPart] = []
    processes = FollowerProcesses(config, started)
    environment = {**os.environ, "MOONSERVE_CLUSTER_TOKEN": config.cluster_token}
    try:
        for rank in range(1, config.pipeline_parallel_size):
            flags = to_flags(follower_config(config, rank))
            started.append(await WorkerPart.start("pipeline-stage", flags, environment))
        yield processes
    finally:
        await processes.stop()


async def _lean_address(rank: int, follower: WorkerPart) -> str:
    """Returns a follower's lean address once it serves. Raises ConfigError if it cannot start."""
    try:
        return (await follower.ready)["lean"]
    except NotReady as error:
        raise ConfigError(f"pipeline stage {rank}: {error}; see its log") from error


def _require_equal(reply: pipeline_pb2.StageJoinReply, own: pipeline_pb2.StageJoinReply, rank: int) -> None:
    """Raises ConfigError if a stage's properties differ from the leader's."""
    expected = (rank, own.size, own.fingerprint, own.kernels, own.attention, own.num_blocks)
    found = (reply.rank, reply.size, reply.fingerprint, reply.kernels, reply.attention, reply.num_blocks)
    if found != expected:
        raise ConfigError(f"pipeline stage {rank} is {found}, and the leader needs {expected}")
