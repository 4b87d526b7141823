"""The prefill worker's I/O: performs the actions of `state` and brings their outcomes back as events.

The only part that awaits and reads the clock. Everything runs in one event loop; the engine has a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from engine.batch import Sampled
from kvstore.block_client import BlockClient
from prefill_worker import actions as act
from prefill_worker import events as ev
from prefill_worker.landing import KvMemory
from prefill_worker.landing_client import LandingClient, lost
from prefill_worker.layer_gate import BoundedWait, LayerGate, PrefixLate
from prefill_worker.layered_load import LayeredLoad
from prefill_worker.pipeline.stage import Checksums, OwnStage, StageEngine
from prefill_worker.sending import Sender
from prefill_worker.state import PrefillState
from prefill_worker.stores import load_prefix, prefetch, put_blocks
from prefill_worker.tasks import Operations
from prefill_worker.traces import trace_prefill, trace_transfer
from protocol.errors import Cancelled, MoonserveError, PeerError
from protocol.ids import GatewayId, LeaseId, RequestId
from protocol.logs import of, of_all
from protocol.pb import conductor_pb2, worker_pb2
from protocol.request import Endpoint, PrefillReport
from protocol.streams import GatewayStreams
from protocol.timer import Timer
from protocol.tracing import NoTracer, Tracer
from transfer import TransferEngine
from transfer.patience import Patience

log = logging.getLogger(__name__)


class Step(Protocol):
    """One forward pass: `pipeline.stage.OwnStep`, or a group's."""

    async def compute(self) -> list[Sampled | None]: ...
    def checksums(self) -> Checksums: ...
    def finish(self) -> None: ...
    async def sent(self, position: int) -> None: ...


class Stages(Protocol):
    """Who computes, as this service sees it: `pipeline.stage.OwnStage`, or a group of such."""

    def begin(
        self, plans: Sequence[act.SlicePlan], on_prefix: Callable[[int], None] | None = None
    ) -> Step: ...

    async def send_blocks(self, action: act.SendBlocks) -> None: ...


class PrefillService:
    """One prefill worker's live part. `look_for_home` is called while it does not know where its home store is."""

    def __init__(
        self,
        state: PrefillState,
        *,
        engine: StageEngine,
        memory: KvMemory,
        transfer: TransferEngine,
        landings: LandingClient,
        stores: BlockClient,
        landing_ttl_s: float,
        patience: Patience | None = None,
        look_for_home: Callable[[], None] = lambda: None,
        group: Stages | None = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._memory = memory
        self._patience = patience or Patience()
        self._sender = Sender(transfer, self._patience)
        self._stages = group or OwnStage(engine, memory, self._sender.submit)
        self._landings = landings
        self._stores = stores
        self._landing_ttl_s = landing_ttl_s
        self._look_for_home = look_for_home
        self._clock = clock
        self._tracer = tracer or NoTracer()
        self.streams = GatewayStreams(on_lost=self._gateway_lost)
        self._operations = Operations(self.post)
        self._gates: dict[RequestId, LayerGate] = {}  # of prefixes that load layer by layer
        self._reservations: dict[RequestId, asyncio.Task[ev.Event | None]] = {}
        self._timer = Timer(lambda: self.post(ev.Tick()), clock)
        self._idle = asyncio.Event()
        self._idle.set()
        self._performers = self._performer_table()
        self._operations.start(self._keep_landings())

    def _performer_table(self) -> Mapping[type, Callable[[Any], object]]:
        start, stores, memory = self._operations.start, self._stores, self._memory
        patience = self._patience
        return {
            act.ReserveLanding: self._start_reserve,
            act.WithdrawReservation: lambda action: self._withdraw(action.request_id),
            act.ReleaseLanding: lambda action: start(self._release(action)),
            act.PrefetchPrefix: lambda action: start(prefetch(stores, action)),
            act.SkipPrefix: _log_skipped,
            act.LoadPrefix: self._start_load,
            act.SendBlocks: lambda action: start(self._send_blocks(action)),
            act.RunStep: lambda action: start(self._run_step(action, self._wait_of(action))),
            act.SendFirstToken: self._send_first_token,
            act.Fail: self._send_failure,
            act.CommitHandoff: lambda action: start(self._commit(action)),
            act.PutBlocks: lambda action: start(put_blocks(stores, memory, action, patience)),
        }

    # -- life

    @property
    def failed(self) -> asyncio.Future[None]:
        """Done, with the exception, when a bug of ours makes going on pointless."""
        return self._operations.failed

    @property
    def is_idle(self) -> bool:
        """No request is here."""
        return self._idle.is_set()

    async def drained(self) -> None:
        """Waits until no request is here."""
        await self._idle.wait()

    async def stop(self) -> None:
        """Ends what is under way. The transfer engine and the engine thread are the caller's to close."""
        self._timer.set(None)
        self.streams.close()
        await self._operations.stop()
        await self._stores.close()

    def load(self) -> conductor_pb2.Load:
        """For heartbeats."""
        state = self._state
        return conductor_pb2.Load(
            num_waiting=state.num_waiting,
            num_running=state.num_running,
            free_blocks=state.num_free_blocks,
            held_blocks=state.num_held_blocks,
            queued_tokens=state.queued_tokens,
            num_blocks=state.pool.capacity,
        )

    def status(self) -> worker_pb2.WorkerStatus:
        """For people and tests."""
        return worker_pb2.WorkerStatus(
            load=self.load(),
            num_blocks=self._state.num_blocks,
            cached_blocks=self._state.num_cached_blocks,
            counters={name: count for name, count in self._state.counters.items() if count},
        )

    def validate(self) -> None:
        """Raises AssertionError when the state's bookkeeping is broken."""
        self._state.validate()

    # -- events in, actions out

    def post(self, event: ev.Event) -> None:
        """Handles an event at once."""
        if isinstance(event, ev.Submitted):
            self._sender.met(event.placement.decode)
        elif isinstance(event, ev.HomeStoreFound):
            self._sender.met(event.store)
        for action in self._state.handle(event, self._clock()):
            self._performers[type(action)](action)
        self._timer.set(self._state.next_deadline())
        if self._state.needs_home_store:
            self._look_for_home()
        if self._state.is_idle:
            self._idle.set()
        else:
            self._idle.clear()

    def home_found(self, store: Endpoint) -> None:
        self.post(ev.HomeStoreFound(store=store))

    def _gateway_lost(self, gateway_id: GatewayId) -> None:
        log.warning("gateway %s is gone; its requests end", gateway_id)
        self.post(ev.GatewayLost(gateway_id=gateway_id))

    # -- landing

    def _start_reserve(self, action: act.ReserveLanding) -> None:
        withdrawn = Cancelled("the reservation was withdrawn", request=action.request_id)
        task = self._operations.start(
            self._reserve(action),
            when_cancelled=ev.LandingRefused(request_id=action.request_id, error=withdrawn),
        )
        self._reservations[action.request_id] = task

        def ended(_task: object) -> None:
            if self._reservations.get(action.request_id) is task:  # else the request has come back
                del self._reservations[action.request_id]

        task.add_done_callback(ended)

    def _withdraw(self, request_id: RequestId) -> None:
        task = self._reservations.get(request_id)
        if task is not None:
            task.cancel()

    async def _reserve(self, action: act.ReserveLanding) -> ev.Event:
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

    async def _commit(self, action: act.CommitHandoff) -> ev.Event:
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
        """Renews the leases of whatever takes long, until cancelled."""
        while True:
            await asyncio.sleep(self._landing_ttl_s / 3)
            for request_id, decode, lease_id in self._state.held_landings():
                self._operations.start(self._renew(request_id, decode, lease_id))

    async def _renew(
        self, request_id: RequestId, decode: Endpoint, lease_id: LeaseId
    ) -> ev.Event | None:
        try:
            await self._landings.renew(decode, lease_id)
        except MoonserveError as error:
            if lost(error):
                return ev.LandingLost(request_id=request_id, lease_id=lease_id, error=error)
            text = "renewal of %s will be tried again: %s"
            log.info(text, lease_id, error, extra=of(request_id))
        return None

    # -- a prefix

    def _start_load(self, action: act.LoadPrefix) -> None:
        stores, memory, patience = self._stores, self._memory, self._patience
        if action.choice.layers_at_once is None:
            self._operations.start(load_prefix(stores, memory, action, patience))
            return
        gate = self._gates[action.request_id] = LayerGate()
        load = LayeredLoad(stores, memory, action, patience, gate, self.post)
        task = self._operations.start(load.run())

        def ended(_task: object) -> None:
            if self._gates.get(action.request_id) is gate:  # else the request has come back
                del self._gates[action.request_id]

        task.add_done_callback(ended)

    # -- computing and sending

    async def _run_step(self, action: act.RunStep, wait: BoundedWait | None) -> ev.Event | None:
        step = self._stages.begin(action.plans, wait.before if wait is not None else None)
        try:
            sampled = await step.compute()
        except PrefixLate as late:
            log.info("a step is given up: %s", late, extra=_whose(action))
            outcome: ev.Event = ev.StepGivenUp()
        except Exception as error:  # whatever the engine raises ends these requests, not the worker
            log.exception("a step failed", extra=_whose(action))
            outcome = ev.StepFailed(error=_as_failure(error), step_id=action.step_id)
        else:
            outcome = ev.StepDone(
                slices=tuple(
                    ev.SliceDone(
                        request_id=plan.slice.request_id, sampled=result, checksums=checksums
                    )
                    for plan, result, checksums in zip(
                        action.plans, sampled, step.checksums(), strict=True
                    )
                ),
                step_id=action.step_id,
                waited_s=wait.waited_s if wait is not None else 0.0,
            )
        # The first token leaves before the last bytes: it is what the client waits for.
        self.post(outcome)
        if isinstance(outcome, ev.StepDone):
            step.finish()
        for position, plan in enumerate(action.plans):
            if plan.landing is not None:
                sent = partial(step.sent, position)
                self._operations.start(_writes(plan.slice.request_id, sent))
        return None

    def _wait_of(self, action: act.RunStep) -> BoundedWait | None:
        """For a step whose only prompt's prefix is arriving; it may have ended when the step begins."""
        if action.max_wait_s is None:
            return None
        [plan] = action.plans
        return BoundedWait(self._gates[plan.slice.request_id], action.max_wait_s)

    async def _send_blocks(self, action: act.SendBlocks) -> ev.Event:
        return await _writes(action.request_id, partial(self._stages.send_blocks, action))

    # -- to the gateway

    def _send_first_token(self, action: act.SendFirstToken) -> None:
        self.streams.send(action.gateway_id, tokens=[action.token], prefills=[action.report])
        if log.isEnabledFor(logging.DEBUG):
            _log_first_token(action.report)
        if action.traceparent:
            trace_prefill(self._tracer, action, self._clock())

    def _send_failure(self, action: act.Fail) -> None:
        level = logging.DEBUG if isinstance(action.error, Cancelled) else logging.WARNING
        log.log(level, "given up: %s", action.error.message, extra=of(action.request_id))
        self.streams.send(action.gateway_id, failures=[(action.request_id, action.error)])


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


async def _writes(request_id: RequestId, sent: Callable[[], Awaitable[None]]) -> ev.Event:
    """The outcome of some writes as an event."""
    try:
        await sent()
    except MoonserveError as error:
        return ev.WritesFailed(request_id=request_id, error=error)
    return ev.WritesDone(request_id=request_id)


def _as_failure(error: Exception) -> MoonserveError:
    """A step's error as its requests' gateways may see it: another worker may do better."""
    failure = PeerError("the prefill engine failed")
    failure.__cause__ = error
    return failure
