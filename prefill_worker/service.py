"""I/O of the prefill worker: performs the actions of `state` and reports their results to it as events.

This is the only part that awaits and reads the clock. It runs in one event loop; the engine has its own thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.client.blocks import BlockStores
from prefill_worker import actions as act
from prefill_worker import events as ev
from prefill_worker.actions import CommitHandoff, SendFirstToken
from prefill_worker.landing import Sender
from prefill_worker.landing_client import LandingClient, lost
from prefill_worker.layered_load import BoundedWait, LayeredLoad, LayerGate, PrefixLate
from prefill_worker.pipeline.stage import OwnStage
from prefill_worker.state import PrefillState
from prefill_worker.stores import load_prefix, prefetch, put_blocks
from protocol.errors import Cancelled, MoonserveError, PeerError
from protocol.ids import LeaseId, RequestId
from protocol.logs import of, of_all
from protocol.pb import conductor_pb2
from protocol.request import Endpoint, PrefillReport
from protocol.tracing import Tracer
from transfer import TransferEngine
from transfer.config import Patience
from worker.events import Action, Event
from worker.memory import KvMemory
from worker.service import WorkerService

if TYPE_CHECKING:
    from engine.runtime import EngineThread  # imports torch
    from prefill_worker.pipeline.group import Group

log = logging.getLogger(__name__)


class PrefillService(WorkerService):
    """The I/O shell of a prefill worker."""

    state: PrefillState

    def __init__(
        self,
        state: PrefillState,
        *,
        engine: EngineThread,
        memory: KvMemory,
        transfer: TransferEngine,
        landings: LandingClient,
        stores: BlockStores,
        landing_ttl_s: float,
        patience: Patience | None = None,
        look_for_home: Callable[[], None] = lambda: None,
        group: Group | None = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(state, look_for_home=look_for_home, tracer=tracer, clock=clock)
        self._memory = memory
        self._patience = patience or Patience()
        self._sender = Sender(transfer, self._patience)
        self._stages: OwnStage | Group = group or OwnStage(engine, memory, self._sender.submit)
        self._landings = landings
        self._stores = stores
        self._landing_ttl_s = landing_ttl_s
        self._gates: dict[RequestId, LayerGate] = {}  # gates of prefixes that load layer by layer
        self._reservations: dict[RequestId, asyncio.Task[Event | None]] = {}
        self._operations.start(self._keep_landings())

    def _role_performers(self) -> Mapping[type[Action], Callable[[Any], object]]:
        return {
            act.ReserveLanding: self._start_reserve,
            act.WithdrawReservation: self._withdraw,
            act.ReleaseLanding: self._starts(self._release),
            act.PrefetchPrefix: self._starts(self._prefetch),
            act.SkipPrefix: _log_skipped,
            act.LoadPrefix: self._start_load,
            act.SendBlocks: self._starts(self._send_blocks),
            act.RunStep: self._start_step,
            act.SendFirstToken: self._send_first_token,
            act.CommitHandoff: self._starts(self._commit),
            act.PutBlocks: self._starts(self._put),
        }

    def load(self) -> conductor_pb2.Load:
        load = super().load()
        load.queued_tokens = self.state.queued_tokens
        return load

    def post(self, event: Event) -> None:
        if isinstance(event, ev.Submitted):
            self._sender.met(event.placement.decode)
        elif isinstance(event, ev.StoreFound):
            self._sender.met(event.store)
        super().post(event)
        if self.state.needs_home_store:
            self._look_for_home()

    # -- landing

    def _start_reserve(self, action: act.ReserveLanding) -> None:
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

    def _withdraw(self, action: act.WithdrawReservation) -> None:
        task = self._reservations.get(action.request_id)
        if task is not None:
            task.cancel()

    async def _reserve(self, action: act.ReserveLanding) -> Event:
        try:
            landing = await self._landings.reserve(action)
        except MoonserveError as error:
            return ev.LandingRefused(request_id=action.request_id, error=error)
        return ev.LandingGranted(request_id=action.request_id, landing=landing)

    async def _release(self, action: act.ReleaseLanding) -> None:
        try:
            await self._landings.release(action.decode, action.lease_id)
        except MoonserveError as error:
            text = "landing %s left to run out: %s"
            log.info(text, action.lease_id, error, extra=of(action.request_id))

    async def _commit(self, action: act.CommitHandoff) -> Event:
        request_id = action.request.request_id
        if action.request.traceparent:
            trace_transfer(self._tracer, action, self._clock())
        try:
            corrupt = await self._landings.commit(action)
        except MoonserveError as error:
            return ev.HandoffFailed(request_id=request_id, error=error)
        if corrupt:
            log.warning("blocks %s arrived corrupt", corrupt, extra=of(request_id))
            return ev.HandoffCorrupt(request_id=request_id, indexes=corrupt)
        log.debug("handed over to %s", action.decode.instance_id, extra=of(request_id))
        return ev.HandoffAccepted(request_id=request_id)

    async def _keep_landings(self) -> None:
        """Renews all held landing leases every third of their TTL, until cancelled."""
        while True:
            await asyncio.sleep(self._landing_ttl_s / 3)
            for request_id, decode, lease_id in self.state.held_landings():
                self._operations.start(self._renew(request_id, decode, lease_id))

    async def _renew(self, request_id: RequestId, decode: Endpoint, lease_id: LeaseId) -> Event | None:
        try:
            await self._landings.renew(decode, lease_id)
        except MoonserveError as error:
            if lost(error):
                return ev.LandingLost(request_id=request_id, lease_id=lease_id, error=error)
            text = "renewal of %s will be tried again: %s"
            log.info(text, lease_id, error, extra=of(request_id))
        return None

    # -- prefix loads and puts

    def _start_load(self, action: act.LoadPrefix) -> None:
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

    async def _prefetch(self, action: act.PrefetchPrefix) -> None:
        await prefetch(self._stores, action)

    async def _put(self, action: act.PutBlocks) -> Event:
        return await put_blocks(self._stores, self._memory, action, self._patience)

    # -- computing and sending

    def _start_step(self, action: act.RunStep) -> None:
        wait = None
        if action.max_wait_s is not None:  # an early step: the prefix of its only prompt is arriving
            [plan] = action.plans
            wait = BoundedWait(self._gates[plan.slice.request_id], action.max_wait_s)
        self._operations.start(self._run_step(action, wait))

    async def _run_step(self, action: act.RunStep, wait: BoundedWait | None) -> Event | None:
        step = self._stages.begin(action.plans, wait.before if wait is not None else None)
        try:
            sampled = await step.compute()
        except PrefixLate as late:
            log.info("a step is given up: %s", late, extra=_whose(action))
            outcome: Event = ev.StepGivenUp()
        except Exception as error:  # an error of the engine must fail only these requests, not the worker
            log.exception("a step failed", extra=_whose(action))
            outcome = ev.StepFailed(error=_as_failure(error), step_id=action.step_id)
        else:
            outcome = ev.StepDone(
                slices=tuple(
                    ev.SliceDone(request_id=plan.slice.request_id, sampled=result, checksums=checksums)
                    for plan, result, checksums in zip(action.plans, sampled, step.checksums(), strict=True)
                ),
                step_id=action.step_id,
                waited_s=wait.waited_s if wait is not None else 0.0,
            )
        # The client waits for the first token, so the loop gets one iteration to send it before the last bytes are
        # submitted.
        self.post(outcome)
        await asyncio.sleep(0)
        if isinstance(outcome, ev.StepDone):
            step.finish()
        for position, plan in enumerate(action.plans):
            if plan.landing is not None:
                sent = partial(step.sent, position)
                self._operations.start(_writes(plan.slice.request_id, sent))
        return None

    async def _send_blocks(self, action: act.SendBlocks) -> Event:
        return await _writes(action.request_id, partial(self._stages.send_blocks, action))

    # -- to the gateway

    def _send_first_token(self, action: act.SendFirstToken) -> None:
        self.streams.send(action.gateway_id, tokens=[action.token], prefills=[action.report])
        if log.isEnabledFor(logging.DEBUG):
            _log_first_token(action.report)
        if action.traceparent:
            trace_prefill(self._tracer, action, self._clock())


def _log_skipped(action: act.SkipPrefix) -> None:
    log.debug("the prefix is computed: %s", action.choice, extra=of(action.request_id))


def _log_first_token(report: PrefillReport) -> None:
    log.debug(
        "first token: %d tokens cached; %.3f s in the queue, %.3f s delayed by loading, %.3f s computed",
        report.cached_tokens,
        report.queue_s,
        report.load_s,
        report.compute_s,
        extra=of(report.request_id),
    )


def _whose(action: act.RunStep) -> Mapping[str, Any]:
    return of_all(plan.slice.request_id for plan in action.plans)


async def _writes(request_id: RequestId, sent: Callable[[], Awaitable[None]]) -> Event:
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
