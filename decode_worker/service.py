"""I/O of the decode worker, and its RPC service `Landing` for prefill workers.

Performs the actions of `DecodeState` and reports their results to it as events.

Events are handled one after the other in the event loop's thread. An action that takes time is a task whose
result is the next event. The path of a token is: `step_runner` → StepDone → SendTokens and the next RunStep.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moonserve.decode_worker.block_verifier import BlockVerifier
from moonserve.decode_worker.decisions import events
from moonserve.decode_worker.decisions.events import GrantLease, LeaseCall
from moonserve.decode_worker.state import DecodeState
from moonserve.decode_worker.step_runner import StepRunner
from moonserve.decode_worker.store_io import OffloadStore
from moonserve.kvstore.client.blocks import BlockStores
from moonserve.protocol.errors import Incompatible, InvalidRequest
from moonserve.protocol.kv_blocks import KvLayout, pack_checksums, unpack_keys
from moonserve.protocol.pb import conductor_pb2, worker_pb2, worker_pb2_grpc
from moonserve.protocol.process.logs import request_extra
from moonserve.protocol.process.tracing import Tracer
from moonserve.protocol.request import BlockId, LeaseId, SamplingParams
from moonserve.protocol.rpc.grpc_transport import Context
from moonserve.protocol.rpc.wire import from_message, request_from_wire, to_message
from moonserve.transfer import TransferEngine
from moonserve.worker.events import Action, Event
from moonserve.worker.process import KvMemory
from moonserve.worker.service import PoolService

if TYPE_CHECKING:
    from moonserve.engine.engine import EngineThread  # imports torch


log = logging.getLogger(__name__)


class DecodeService(PoolService):
    """The I/O shell of a decode worker, called by the servicers. Call `finish` before `stop`."""

    state: DecodeState

    def __init__(
        self,
        state: DecodeState,
        compute: "EngineThread",
        transfer: TransferEngine,
        memory: KvMemory,
        *,
        stores: BlockStores | None = None,
        look_for_home: Callable[[], None] = lambda: None,
        observe_allocation: Callable[[float], None] = lambda _: None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stores` is None if no home store is ever found. `observe_allocation` is called with the seconds that each
        granted reservation waited for its blocks."""
        super().__init__(state, look_for_home=look_for_home, tracer=tracer, clock=clock)
        self._transfer = transfer
        self._memory = memory
        self._verifier = BlockVerifier(memory.segment.buffer, memory.layout, memory.num_blocks)
        self._stores = stores
        self._store_access: OffloadStore | None = None
        if stores is not None:
            self._store_access = OffloadStore(stores, memory, self._verifier)
        self._observe_allocation = observe_allocation
        self._step_runner = StepRunner(compute, clock, self.steps)
        self._windows: dict[LeaseId, int] = {}  # window ids of open windows
        self._pending_calls: dict[tuple[LeaseCall, LeaseId], list[asyncio.Future[Any]]] = {}

    def _role_action_handlers(self) -> Mapping[type[Action], Callable[[Any], object]]:
        return {
            events.CloseWindow: self._as_operation(self._close_window),
            events.GrantLease: self._grant,
            events.ConfirmRenewal: lambda action: self._answer(LeaseCall.RENEW, action.lease_id),
            events.VerifyBlocks: self._as_operation(self._verify),
            events.AnswerCommit: lambda action: self._answer(LeaseCall.COMMIT, action.lease_id, action.corrupt),
            events.Refuse: self._refuse,
            events.RunStep: self._run_step,
            events.SendTokens: self._send_tokens,
            events.StoreBlocks: self._as_operation(self._store_blocks),
            events.LoadBlocks: self._as_operation(self._load_blocks),
        }

    def drain(self, draining: bool) -> None:
        super().drain(draining)
        self.post(events.Draining(is_on=draining))

    async def finish(self) -> None:
        """Fails the remaining requests and waits until all windows are closed."""
        if not self.failed.done():
            self.post(events.Stopped())
            await self._operations.wait_until_done()

    def load(self) -> conductor_pb2.Load:
        load, state = super().load(), self.state
        load.leased_blocks = state.num_leased_blocks
        load.context_tokens = state.context_tokens
        load.num_preemptions = state.counters.num_preemptions
        load.steps.CopyFrom(self._step_runner.step_totals)
        return load

    # -- calls of the servicers

    @property
    def now(self) -> float:
        return self._clock()

    async def reserve(self, event: events.ReserveRequested) -> tuple[GrantLease, int | None]:
        """Waits for blocks and returns the grant and its window id; the id is None if nothing is to be written. Raises
        the state's error if it refuses."""
        asked_at = self._clock()
        try:
            answer: tuple[GrantLease, int | None] = await self._call(LeaseCall.RESERVE, event.lease_id, event)
        except asyncio.CancelledError:
            if (LeaseCall.RESERVE, event.lease_id) not in self._pending_calls:
                self.post(events.ReserveWithdrawn(lease_id=event.lease_id))
            raise
        self._observe_allocation(self._clock() - asked_at)
        return answer

    async def renew(self, event: events.LeaseRenewed) -> None:
        await self._call(LeaseCall.RENEW, event.lease_id, event)

    async def commit(self, event: events.CommitRequested) -> tuple[int, ...]:
        """Returns the indexes of the corrupt blocks. If there are none, this worker now owns the request."""
        corrupt: tuple[int, ...] = await self._call(LeaseCall.COMMIT, event.lease_id, event)
        return corrupt

    async def _call(self, question: LeaseCall, lease_id: LeaseId, event: Event) -> Any:
        """Posts the event and waits for its answer. Several calls may wait for the same answer: a caller that lost its
        connection calls again."""
        key = (question, lease_id)
        future = asyncio.get_running_loop().create_future()
        self._pending_calls.setdefault(key, []).append(future)
        try:
            self.post(event)
            return await future
        finally:
            waiting = self._pending_calls.get(key, [])
            if future in waiting:
                waiting.remove(future)
                if not waiting:
                    del self._pending_calls[key]

    def _answer(self, question: LeaseCall, lease_id: LeaseId, answer: Any = None) -> None:
        for future in self._pending_calls.pop((question, lease_id), ()):
            if not future.done():
                future.set_result(answer)

    def _refuse(self, action: events.Refuse) -> None:
        for future in self._pending_calls.pop((action.call, action.lease_id), ()):
            if not future.done():
                future.set_exception(action.error)

    # -- actions

    def _grant(self, action: GrantLease) -> None:
        landing = action.blocks[action.num_cached :]
        if landing and action.lease_id not in self._windows:  # a repeated grant keeps its window
            ranges = landing_ranges(landing, self._memory.layout, self._memory.num_blocks)
            opened = self._transfer.open_window(self._memory.segment, ranges)
            self._windows[action.lease_id] = opened
        window_id = self._windows.get(action.lease_id)
        self._answer(LeaseCall.RESERVE, action.lease_id, (action, window_id))

    async def _close_window(self, action: events.CloseWindow) -> Event:
        # Closing blocks until the stores in flight end, so it runs in another thread.
        await asyncio.to_thread(self._transfer.close_window, self._windows.pop(action.lease_id))
        await self._memory.staging.load(action.landed)
        return events.WindowClosed(lease_id=action.lease_id)

    async def _verify(self, action: events.VerifyBlocks) -> Event:
        verdict = await self._verifier.verify_async(action.blocks)
        corrupt = verdict.corrupt
        if corrupt:
            text = "%d of %d landed blocks are corrupt"
            log.warning(text, len(corrupt), len(action.blocks), extra=request_extra(action.request_id))
        return events.Verified(lease_id=action.lease_id, corrupt=corrupt, checksums=verdict.checksums)

    async def _run_steps(self) -> None:
        async for outcome in self._step_runner.outcomes():
            self.post(outcome)

    def _run_step(self, action: events.RunStep) -> None:
        if self._step_runner.add(action.slices):
            self._operations.start(self._run_steps())

    def _send_tokens(self, action: events.SendTokens) -> None:
        self.streams.send(action.gateway_id, tokens=action.tokens, decodes=action.began)
        for phase in action.ended:
            self._trace(phase)
        if log.isEnabledFor(logging.DEBUG):
            for token in action.tokens:
                if token.finish_reason is not None:
                    text = "ended with token %d: %s"
                    log.debug(text, token.index, token.finish_reason, extra=request_extra(token.request_id))

    def _trace(self, phase: events.DecodePhase) -> None:
        span = self._tracer.span
        span("decode queue", phase.traceparent, phase.queued_at, phase.began_at)
        span(
            "decode",
            phase.traceparent,
            phase.began_at,
            self._clock(),
            num_tokens=phase.num_tokens,
            times_preempted=phase.times_preempted,
            num_draft_tokens=phase.num_draft_tokens,
            num_accepted_tokens=phase.num_accepted_tokens,
        )

    async def _store_blocks(self, action: events.StoreBlocks) -> None:
        assert self._store_access is not None, "no home, nothing to keep"
        outcome = await self._store_access.store(action)
        self.post(outcome)
        if outcome.error is not None:
            self._look_for_home()

    async def _load_blocks(self, action: events.LoadBlocks) -> Event:
        assert self._store_access is not None, "no home, nothing was kept"
        return await self._store_access.load(action)


def landing_ranges(blocks: Sequence[BlockId], layout: KvLayout, num_blocks: int) -> list[tuple[int, int]]:
    """Returns (offset, length) of all pieces of the given blocks in a pool. Adjacent blocks share one range."""
    runs: list[list[int]] = []  # [first block, number of blocks]
    for block in sorted(blocks):
        if runs and sum(runs[-1]) == block:
            runs[-1][1] += 1
        else:
            runs.append([block, 1])
    return [
        (layout.pool_offset(num_blocks, piece, first), count * layout.piece_bytes)
        for piece in range(layout.pieces_per_block)
        for first, count in runs
    ]


MAX_TTL_S = 60.0
# Upper limit, and the value for callers that set no deadline.
MAX_RESERVE_WAIT_S = 60.0
# A refusal must still reach its caller before the call's own deadline.
ANSWER_MARGIN_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingZone:
    """Address and properties of the memory that prefill workers write to."""

    transfer_address: str
    segment_id: int
    num_blocks: int
    block_size: int
    fingerprint: str


class LandingServicer(worker_pb2_grpc.LandingServicer):
    """Serves `Landing` to prefill workers: reserve, renew, commit and release."""

    def __init__(
        self,
        service: DecodeService,
        zone: LandingZone,
        prepare: Callable[[SamplingParams], Awaitable[None]] | None = None,
    ) -> None:
        """`prepare` is awaited before a committed request reaches the service (`EngineThread.prepare`)."""
        self._service = service
        self._zone = zone
        self._prepare = prepare

    async def Reserve(self, request: worker_pb2.ReserveRequest, context: Context) -> worker_pb2.LandingLease:
        event = self._reservation(request, context.time_remaining())
        grant, window_id = await self._service.reserve(event)
        return to_message(
            worker_pb2.LandingLease,
            self._zone,
            lease_id=grant.lease_id,
            block_ids=grant.blocks,
            num_cached_blocks=grant.num_cached,
            window_id=window_id or 0,  # unset when nothing is to be written
            ttl_s=grant.ttl_s,
        )

    async def Renew(self, request: worker_pb2.RenewRequest, context: Context) -> worker_pb2.RenewReply:
        lease_id = LeaseId(request.lease_id)
        await self._service.renew(events.LeaseRenewed(lease_id=lease_id, ttl_s=_ttl_s(request.ttl_s)))
        return worker_pb2.RenewReply()

    async def Commit(self, request: worker_pb2.CommitRequest, context: Context) -> worker_pb2.CommitReply:
        try:
            committed = request_from_wire(request)
        except ValueError as error:
            raise InvalidRequest(str(error), request=request.request_id) from error
        if self._prepare is not None:
            await self._prepare(committed.sampling)
        corrupt = await self._service.commit(
            events.CommitRequested(
                lease_id=LeaseId(request.lease_id),
                request=committed,
                checksums=_checksums(request),
                part_layers=tuple(request.part_layers),
                transfer_s=request.transfer_s,
            )
        )
        if not corrupt:
            text = "landed: %d blocks, %.3f s after its first token"
            whose = request_extra(committed.request_id)
            log.debug(text, len(committed.block_keys), request.transfer_s, extra=whose)
        return worker_pb2.CommitReply(corrupt=corrupt)

    async def Release(self, request: worker_pb2.ReleaseRequest, context: Context) -> worker_pb2.ReleaseReply:
        self._service.post(events.LeaseReleased(lease_id=LeaseId(request.lease_id)))
        return worker_pb2.ReleaseReply()

    def _reservation(self, request: worker_pb2.ReserveRequest, remaining_s: float | None) -> events.ReserveRequested:
        """Returns the event of a valid request. Raises Incompatible or InvalidRequest."""
        self._require_same_fingerprint(request)
        try:
            keys = tuple(unpack_keys(request.block_keys))
        except ValueError as error:
            raise InvalidRequest(str(error), request=request.request_id) from error
        if not request.lease_id or not request.request_id or request.num_tokens < 1:
            raise InvalidRequest("a reservation needs ids and at least one token")
        if len(keys) != request.num_tokens // self._zone.block_size:
            raise InvalidRequest(
                f"{len(keys)} block keys for {request.num_tokens} tokens in blocks of {self._zone.block_size}",
                request=request.request_id,
            )
        wait_s = MAX_RESERVE_WAIT_S if remaining_s is None else min(remaining_s, MAX_RESERVE_WAIT_S)
        return from_message(
            events.ReserveRequested,
            request,
            block_keys=keys,
            ttl_s=_ttl_s(request.ttl_s),
            deadline_at=self._service.now + max(0.0, wait_s - ANSWER_MARGIN_S),
            num_prompt_tokens=request.num_prompt_tokens or None,
        )

    def _require_same_fingerprint(self, request: worker_pb2.ReserveRequest) -> None:
        if request.fingerprint != self._zone.fingerprint:
            raise Incompatible(
                "the prefill worker's weights or KV layout differ from this decode worker's",
                prefill=request.fingerprint,
                decode=self._zone.fingerprint,
            )


def _checksums(request: worker_pb2.CommitRequest) -> tuple[int, ...]:
    """Returns one checksum per block, joining those of a block's parts. Raises InvalidRequest if some are missing."""
    num_parts = max(1, len(request.part_layers))
    if len(request.checksums) % num_parts:
        raise InvalidRequest(
            f"{len(request.checksums)} checksums of blocks in {num_parts} parts",
            request=request.request_id,
        )
    starts = range(0, len(request.checksums), num_parts)
    return tuple(pack_checksums(request.checksums[start : start + num_parts]) for start in starts)


def _ttl_s(requested_s: float) -> float:
    if not requested_s > 0.0:
        raise InvalidRequest(f"the lease time {requested_s} s must be above 0", param="ttl_s")
    return min(requested_s, MAX_TTL_S)
