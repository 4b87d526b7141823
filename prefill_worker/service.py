"""I/O of the prefill worker: performs the actions of `state` and reports their results to it as events.

This is the only part that awaits and reads the clock. It runs in one event loop; the engine has its own thread.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from moonserve.kvstore.client.blocks import BlockStores
from moonserve.prefill_worker.decisions import events as ev
from moonserve.prefill_worker.decisions.events import CommitHandoff, SendFirstToken
from moonserve.prefill_worker.decode_client import DecodeClient, lease_has_ended
from moonserve.prefill_worker.kv_writes import KvSender
from moonserve.prefill_worker.pipeline_stage import StageExecutor, StageStep
from moonserve.prefill_worker.state import PrefillState
from moonserve.prefill_worker.store_io import (
    BoundedWait,
    LayeredLoad,
    LayerGate,
    PrefixTimeout,
    load_prefix,
    prefetch,
    put_blocks,
)
from moonserve.protocol.errors import Cancelled, MoonserveError, PeerError
from moonserve.protocol.process.logs import request_extra, requests_extra
from moonserve.protocol.process.tracing import Tracer
from moonserve.protocol.request import Endpoint, LeaseId, PrefillReport, RequestId
from moonserve.transfer import TransferEngine
from moonserve.transfer.config import TransferTimeout
from moonserve.worker.events import Action, Event
from moonserve.worker.process import KvMemory
from moonserve.worker.service import PoolService

if TYPE_CHECKING:
    from moonserve.engine.engine import EngineThread  # imports torch
    from moonserve.prefill_worker.pipeline_leader import GroupStep, PipelineGroup

log = logging.getLogger(__name__)


class PrefillService(PoolService):
    """The I/O shell of a prefill worker."""

    state: PrefillState

    def __init__(
        self,
        state: PrefillState,
        *,
        engine: "EngineThread",
        memory: KvMemory,
        transfer: TransferEngine,
        landings: DecodeClient,
        stores: BlockStores,
        landing_ttl_s: float,
        patience: TransferTimeout | None = None,
        look_for_home: Callable[[], None] = lambda: None,
        group: "PipelineGroup | None" = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(state, look_for_home=look_for_home, tracer=tracer, clock=clock)
        self._memory = memory
        self._patience = patience or TransferTimeout()
        self._sender = KvSender(transfer, self._patience)
        self._stages: StageExecutor | PipelineGroup = group or StageExecutor(engine, memory, self._sender.submit)
        self._decode_client = landings
        self._stores = stores
        self._landing_ttl_s = landing_ttl_s
        self._step: StageStep | GroupStep | None = None  # the last step
        self._gates: dict[RequestId, LayerGate] = {}  # gates of prefixes that load layer by layer
        self._reservations: dict[RequestId, asyncio.Task[Event | None]] = {}
        self._operations.start(self._renew_leases_periodically())

    def _role_action_handlers(self) -> Mapping[type[Action], Callable[[Any], object]]:
        return {
            ev.ReserveLanding: self._start_reserve,
            ev.WithdrawReservation: self._withdraw_reservation,
            ev.ReleaseLanding: self._as_operation(self._release),
            ev.PrefetchPrefix: self._as_operation(lambda action: prefetch(self._stores, action)),
            ev.SkipPrefix: _log_skipped,
            ev.LoadPrefix: self._start_load,
            ev.SendBlocks: self._as_operation(self._send_blocks),
            ev.RunStep: self._start_step,
            ev.SendStep: self._send_step,
            ev.SendFirstToken: self._send_first_token,
            ev.CommitHandoff: self._as_operation(self._commit),
            ev.PutBlocks: self._as_operation(
                lambda action: put_blocks(self._stores, self._memory, action, self._patience)
            ),
        }

    def post(self, event: Event) -> None:
        if isinstance(event, ev.Submitted):
            self._sender.note_peer(event.placement.decode)
        elif isinstance(event, ev.StoreFound):
            self._sender.note_peer(event.store)
        super().post(event)
        if self.state.needs_home_store:
            self._look_for_home()

    # -- landing

    def _start_reserve(self, action: ev.ReserveLanding) -> None:
        withdrawn = Cancelled("the reservation was withdrawn", request=action.request_id)
        task = self._operations.start(
            self._reserve(action),
            when_cancelled=ev.LandingRefused(request_id=action.request_id, error=withdrawn),
        )
        self._reservations[action.request_id] = task

        def ended(_task: object) -> None:
            if self._reservations.get(action.request_id) is task:  # else the request was submitted again
                del self._reservations[action.request_id]

        task.add_done_callback(ended)

    def _withdraw_reservation(self, action: ev.WithdrawReservation) -> None:
        task = self._reservations.get(action.request_id)
        if task is not None:
            task.cancel()

    async def _reserve(self, action: ev.ReserveLanding) -> Event:
        try:
            landing = await self._decode_client.reserve(action)
        except MoonserveError as error:
            return ev.LandingRefused(request_id=action.request_id, error=error)
        return ev.LandingGranted(request_id=action.request_id, landing=landing)

    async def _release(self, action: ev.ReleaseLanding) -> None:
        try:
            await self._decode_client.release(action.decode, action.lease_id)
        except MoonserveError as error:
            text = "landing %s left to run out: %s"
            log.info(text, action.lease_id, error, extra=request_extra(action.request_id))

    async def _commit(self, action: ev.CommitHandoff) -> Event:
        request_id = action.request.request_id
        if action.request.traceparent:
            trace_transfer(self._tracer, action, self._clock())
        try:
            corrupt = await self._decode_client.commit(action)
        except MoonserveError as error:
            return ev.HandoffFailed(request_id=request_id, error=error)
        if corrupt:
            log.warning("blocks %s arrived corrupt", corrupt, extra=request_extra(request_id))
            return ev.HandoffCorrupt(request_id=request_id, indexes=corrupt)
        log.debug("handed over to %s", action.decode.instance_id, extra=request_extra(request_id))
        return ev.HandoffAccepted(request_id=request_id)

    async def _renew_leases_periodically(self) -> None:
        """Renews all held landing leases every third of their TTL, until cancelled."""
        while True:
            await asyncio.sleep(self._landing_ttl_s / 3)
            for request_id, decode, lease_id in self.state.leases_to_renew():
                self._operations.start(self._renew(request_id, decode, lease_id))

    async def _renew(self, request_id: RequestId, decode: Endpoint, lease_id: LeaseId) -> Event | None:
        try:
            await self._decode_client.renew(decode, lease_id)
        except MoonserveError as error:
            if lease_has_ended(error):
                return ev.LandingLost(request_id=request_id, lease_id=lease_id, error=error)
            text = "renewal of %s will be tried again: %s"
            log.info(text, lease_id, error, extra=request_extra(request_id))
        return None

    # -- prefix loads

    def _start_load(self, action: ev.LoadPrefix) -> None:
        stores, memory, patience = self._stores, self._memory, self._patience
        if action.choice.layers_at_once is None:
            self._operations.start(load_prefix(stores, memory, action, patience))
            return
        gate = self._gates[action.request_id] = LayerGate()
        load = LayeredLoad(stores, memory, action, patience, gate, self.post)
        task = self._operations.start(load.run())

        def ended(_task: object) -> None:
            if self._gates.get(action.request_id) is gate:  # else the request was submitted again
                del self._gates[action.request_id]

        task.add_done_callback(ended)

    # -- computing and sending

    def _start_step(self, action: ev.RunStep) -> None:
        wait = None
        if action.max_wait_s is not None:  # an early step: the prefix of its only prompt is arriving
            [plan] = action.plans
            wait = BoundedWait(self._gates[plan.slice.request_id], action.max_wait_s)
        self._step = self._stages.begin(action.plans, wait.before if wait is not None else None)
        self._operations.start(self._run_step(action, self._step, wait))

    async def _run_step(
        self, action: ev.RunStep, step: "StageStep | GroupStep", wait: BoundedWait | None
    ) -> Event | None:
        began_at = self._clock()
        try:
            sampled = await step.compute()
        except PrefixTimeout as late:
            log.info("a step was abandoned: %s", late, extra=_request_extra(action))
            outcome: Event = ev.StepGivenUp()
        except Exception as error:  # an error of the engine must fail only these requests, not the worker
            log.exception("a step failed", extra=_request_extra(action))
            outcome = ev.StepFailed(error=_as_failure(error), step_id=action.step_id)
        else:
            waited_s = wait.waited_s if wait is not None else 0.0
            self.steps.add_slices([plan.slice for plan in action.plans], began_at, self._clock(), waited_s)
            outcome = ev.StepDone(
                slices=tuple(
                    ev.SliceDone(request_id=plan.slice.request_id, sampled=result, checksums=checksums)
                    for plan, result, checksums in zip(action.plans, sampled, step.checksums(), strict=True)
                ),
                step_id=action.step_id,
                waited_s=waited_s,
            )
        # The client waits for the first token, so the loop gets one iteration to send it before the last bytes are
        # submitted.
        self.post(outcome)
        await asyncio.sleep(0)
        if isinstance(outcome, ev.StepDone):
            step.finish()
        for position, plan in enumerate(action.plans):
            if step.is_sent(position):
                sent = partial(step.wait_until_sent, position)
                self._operations.start(_wait_for_writes(plan.slice.request_id, sent))
        return None

    def _send_step(self, action: ev.SendStep) -> None:
        assert isinstance(self._step, StageStep), "a pipeline's steps have landings"
        self._step.send_to(action.landing, action.send_from)

    async def _send_blocks(self, action: ev.SendBlocks) -> Event:
        return await _wait_for_writes(action.request_id, partial(self._stages.send_blocks, action))

    # -- to the gateway

    def _send_first_token(self, action: ev.SendFirstToken) -> None:
        self.streams.send(action.gateway_id, tokens=[action.token], prefills=[action.report])
        if log.isEnabledFor(logging.DEBUG):
            _log_first_token(action.report)
        if action.traceparent:
            trace_prefill(self._tracer, action, self._clock())


def _log_skipped(action: ev.SkipPrefix) -> None:
    log.debug("the prefix is computed: %s", action.choice, extra=request_extra(action.request_id))


def _log_first_token(report: PrefillReport) -> None:
    log.debug(
        "first token: %d tokens cached; %.3f s in the queue, %.3f s delayed by loading, %.3f s computed",
        report.cached_tokens,
        report.queue_s,
        report.load_s,
        report.compute_s,
        extra=request_extra(report.request_id),
    )


def _request_extra(action: ev.RunStep) -> Mapping[str, Any]:
    return requests_extra(plan.slice.request_id for plan in action.plans)


async def _wait_for_writes(request_id: RequestId, sent: Callable[[], Awaitable[None]]) -> Event:
    """Waits for writes and returns their outcome as an event."""
    try:
        await sent()
    except MoonserveError as error:
        return ev.WritesFailed(request_id=request_id, error=error)
    return ev.WritesDone(request_id=request_id)


def _as_failure(error: Exception) -> MoonserveError:
    """Returns a step's error as a retryable one for the gateways, since another worker may succeed."""
    failure = PeerError("the prefill engine failed")
    failure.__cause__ = error
    return failure


def trace_prefill(tracer: Tracer, action: SendFirstToken, now: float) -> None:
    """Writes the spans from the submission to the first token. Its parts are laid end to end: a prompt that shares the
    engine waits and computes in turns, and only the sums are known."""
    report = action.report
    parts = {"queue": report.queue_s, "load": report.load_s, "compute": report.compute_s}
    at = now - sum(parts.values())
    parent = tracer.span("prefill", action.traceparent, at, now, cached_tokens=report.cached_tokens)
    for name, seconds in parts.items():
        tracer.span(name, parent, at, at + seconds)
        at += seconds


def trace_transfer(tracer: Tracer, action: CommitHandoff, now: float) -> None:
    """Writes the span from the first token to the commit, which follows the last byte."""
    tracer.span(
        "transfer",
        action.request.traceparent,
        now - action.transfer_s,
        now,
        decode_instance=action.decode.instance_id,
        blocks_sent=len(action.checksums),
        blocks_cached=action.num_cached_blocks,
    )
