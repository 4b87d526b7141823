"""`DecodeService`: runs what `DecodeState` decides and tells it what came of it.

Its rule: events are handled one after the other in the event loop's thread; whatever takes time is a held task whose
result is the next event. The path of a token is: `stepping` → StepDone → SendTokens and the next RunStep.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from decode_worker import actions, events
from decode_worker.actions import Action, GrantLease
from decode_worker.events import Event
from decode_worker.state import DecodeState
from decode_worker.stepping import Compute, Stepping
from decode_worker.store_access import StoreAccess
from decode_worker.verify import BlockVerifier, Verdict
from engine.staging import InPlace, Staging
from kvstore.block_client import BlockClient
from protocol.errors import Cancelled, MoonserveError
from protocol.ids import BlockId, GatewayId, LeaseId
from protocol.layout import KvLayout
from protocol.logs import of
from protocol.pb import conductor_pb2, worker_pb2
from protocol.request import Endpoint
from protocol.streams import GatewayStreams
from protocol.timer import Timer
from protocol.tracing import NoTracer, Tracer
from transfer import Segment, TransferEngine

log = logging.getLogger(__name__)

# Below this, checking takes less time (0.1 ms at memory speed) than handing it to a thread.
VERIFY_INLINE_BYTES = 1 << 20


class Question(Enum):
    """Calls that the state answers with an action."""

    RESERVE = auto()
    RENEW = auto()
    COMMIT = auto()


class DecodeService:
    """`run` it for as long as the worker lives; the servicers call the rest."""

    def __init__(
        self,
        state: DecodeState,
        compute: Compute,
        transfer: TransferEngine,
        segment: Segment,
        layout: KvLayout,
        *,
        stores: BlockClient | None = None,
        staging: Staging | None = None,
        look_for_home: Callable[[], None] = lambda: None,
        observe_allocation: Callable[[float], None] = lambda _: None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stores`: None where no home store is ever found. `staging`: None where steps compute from the segment.
        `look_for_home`: it could not be reached. `observe_allocation`: gets the seconds that each granted landing
        waited for its blocks."""
        self.streams = GatewayStreams(self._on_gateway_lost)
        self.idle = asyncio.Event()
        self._state = state
        self._compute = compute
        self._transfer = transfer
        self._segment = segment
        self._layout = layout
        self._staging = staging or InPlace()
        self._verifier = BlockVerifier(segment.buffer, layout, state.num_blocks)
        self._store_access: StoreAccess | None = None
        if stores is not None:
            self._store_access = StoreAccess(
                stores, segment, layout, state.num_blocks, self._verifier, self._staging
            )
        self._look_for_home = look_for_home
        self._observe_allocation = observe_allocation
        self._tracer = tracer or NoTracer()
        self._clock = clock
        self._inbox: deque[Event] = deque()
        self._stepping = Stepping(compute, clock)
        self._is_handling = False
        self._tasks: asyncio.TaskGroup | None = None  # while `run` is under way
        self._timer = Timer(lambda: self.handle(events.Tick()), clock)
        self._questions: dict[tuple[Question, LeaseId], list[asyncio.Future[Any]]] = {}
        self._runners = self._table()

    async def run(self, until: asyncio.Event) -> None:
        """Works until the event is set, then fails what is left. What a task raises is a bug and ends it too."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await until.wait()
                self.handle(events.Stopped())
        finally:
            self._tasks = None
            self._timer.set(None)

    def handle(self, event: Event) -> None:
        """Handles `event` and all that follows from it at once. Tasks need `run` to be under way."""
        self._inbox.append(event)
        if self._is_handling:
            return  # the handler up the stack takes it next
        self._is_handling = True
        try:
            while self._inbox:
                for action in self._state.handle(self._inbox.popleft(), self._clock()):
                    self._runners[type(action)](action)
        finally:
            self._is_handling = False
        self._timer.set(self._state.wake_at)
        self._note_idleness()

    # -- what the servicers ask

    @property
    def now(self) -> float:
        return self._clock()

    async def reserve(self, event: events.ReserveRequested) -> GrantLease:
        """Waits for blocks. Raises what the state refuses with."""
        asked_at = self._clock()
        try:
            grant: GrantLease = await self._ask(Question.RESERVE, event.lease_id, event)
        except asyncio.CancelledError:
            if (Question.RESERVE, event.lease_id) not in self._questions:
                self.handle(events.ReserveWithdrawn(lease_id=event.lease_id))
            raise
        self._observe_allocation(self._clock() - asked_at)
        return grant

    async def renew(self, event: events.LeaseRenewed) -> None:
        await self._ask(Question.RENEW, event.lease_id, event)

    async def commit(self, event: events.CommitRequested) -> tuple[int, ...]:
        """Indexes of the corrupt blocks; none means that the request is this worker's now."""
        corrupt: tuple[int, ...] = await self._ask(Question.COMMIT, event.lease_id, event)
        return corrupt

    def home_found(self, store: Endpoint) -> None:
        self.handle(events.StoreFound(store=store))

    def load(self) -> conductor_pb2.Load:
        """What heartbeats and GetStatus tell."""
        state = self._state
        return conductor_pb2.Load(
            num_waiting=state.num_waiting,
            num_running=state.num_running,
            free_blocks=state.num_free_blocks,
            held_blocks=state.num_held_blocks,
            leased_blocks=state.num_leased_blocks,
            context_tokens=state.context_tokens,
            num_preemptions=state.counters.num_preemptions,
            steps=self._stepping.counted,
            num_blocks=state.capacity,
        )

    def status(self) -> worker_pb2.WorkerStatus:
        """For people, tests and metrics."""
        state = self._state
        return worker_pb2.WorkerStatus(
            load=self.load(),
            num_blocks=state.num_blocks,
            cached_blocks=state.num_cached_blocks,
            counters=state.counters.as_dict(),
        )

    @property
    def state(self) -> DecodeState:
        """For reading figures."""
        return self._state

    async def _ask(self, question: Question, lease_id: LeaseId, event: Event) -> Any:
        """Several calls may wait for the same answer: a caller that lost its connection asks again."""
        key = (question, lease_id)
        future = asyncio.get_running_loop().create_future()
        self._questions.setdefault(key, []).append(future)
        try:
            self.handle(event)
            return await future
        finally:
            waiting = self._questions.get(key, [])
            if future in waiting:
                waiting.remove(future)
                if not waiting:
                    del self._questions[key]

    def _answer(self, question: Question, lease_id: LeaseId, answer: Any) -> None:
        for future in self._questions.pop((question, lease_id), ()):
            if future.done():
                continue
            if isinstance(answer, MoonserveError):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    # -- actions

    def _table(self) -> Mapping[type[Action], Callable[[Any], None]]:
        def answer(question: Question, of: Callable[[Any], Any]) -> Callable[[Any], None]:
            return lambda action: self._answer(question, action.lease_id, of(action))

        return {
            actions.OpenWindow: self._open_window,
            actions.CloseWindow: lambda action: self._spawn(self._close_window(action)),
            actions.GrantLease: answer(Question.RESERVE, lambda action: action),
            actions.RefuseLease: answer(Question.RESERVE, lambda action: action.error),
            actions.ConfirmRenewal: answer(Question.RENEW, lambda action: None),
            actions.RefuseRenewal: answer(Question.RENEW, lambda action: action.error),
            actions.VerifyBlocks: self._verify,
            actions.AcceptCommit: answer(Question.COMMIT, lambda action: ()),
            actions.ReportCorrupt: answer(Question.COMMIT, lambda action: action.corrupt),
            actions.RejectCommit: answer(Question.COMMIT, lambda action: action.error),
            actions.RunStep: self._run_step,
            actions.SendTokens: self._send_tokens,
            actions.Fail: self._fail,
            actions.KeepBlocks: lambda action: self._spawn(self._keep(action)),
            actions.LoadBlocks: lambda action: self._spawn(self._load_back(action)),
        }

    def _open_window(self, action: actions.OpenWindow) -> None:
        ranges = landing_ranges(action.blocks, self._layout, self._state.num_blocks)
        window_id = self._transfer.open_window(self._segment, ranges)
        self.handle(events.WindowOpened(lease_id=action.lease_id, window_id=window_id))

    async def _close_window(self, action: actions.CloseWindow) -> None:
        # Waits for stores under way, so not in this thread.
        await asyncio.to_thread(self._transfer.close_window, action.window_id)
        await self._staging.load(action.landed)
        self.handle(events.WindowClosed(lease_id=action.lease_id))

    def _verify(self, action: actions.VerifyBlocks) -> None:
        if self._verifier.num_bytes(action.blocks) > VERIFY_INLINE_BYTES:
            self._spawn(self._verify_in_thread(action))
        else:
            self._report_verified(action, self._verifier.verdict(action.blocks))

    async def _verify_in_thread(self, action: actions.VerifyBlocks) -> None:
        verdict = await asyncio.to_thread(self._verifier.verdict, action.blocks)
        self._report_verified(action, verdict)

    def _report_verified(self, action: actions.VerifyBlocks, verdict: Verdict) -> None:
        corrupt = verdict.corrupt
        if corrupt:
            text = "%d of %d landed blocks are corrupt"
            log.warning(text, len(corrupt), len(action.blocks), extra=of(action.request_id))
        self.handle(
            events.Verified(lease_id=action.lease_id, corrupt=corrupt, checksums=verdict.checksums)
        )

    async def _run_steps(self) -> None:
        async for outcome in self._stepping.outcomes():
            self.handle(outcome)

    def _run_step(self, action: actions.RunStep) -> None:
        if self._stepping.add(action.slices):
            self._spawn(self._run_steps())

    def _send_tokens(self, action: actions.SendTokens) -> None:
        self.streams.send(action.gateway_id, tokens=action.tokens, decodes=action.began)
        for phase in action.ended:
            self._trace(phase)
        if log.isEnabledFor(logging.DEBUG):
            _log_ends(action)

    def _trace(self, phase: actions.DecodePhase) -> None:
        span = self._tracer.span
        span("decode queue", phase.traceparent, phase.queued_at, phase.began_at)
        span(
            "decode",
            phase.traceparent,
            phase.began_at,
            self._clock(),
            num_tokens=phase.num_tokens,
            times_preempted=phase.times_preempted,
        )

    def _fail(self, action: actions.Fail) -> None:
        level = logging.DEBUG if isinstance(action.error, Cancelled) else logging.WARNING
        log.log(level, "given up: %s", action.error.message, extra=of(action.request_id))
        self.streams.send(action.gateway_id, failures=[(action.request_id, action.error)])

    async def _keep(self, action: actions.KeepBlocks) -> None:
        assert self._store_access is not None, "no home, nothing to keep"
        outcome = await self._store_access.keep(action)
        self.handle(outcome)
        if outcome.error is not None:
            self._look_for_home()

    async def _load_back(self, action: actions.LoadBlocks) -> None:
        assert self._store_access is not None, "no home, nothing was kept"
        self.handle(await self._store_access.load(action))

    # -- plumbing

    def _on_gateway_lost(self, gateway_id: GatewayId) -> None:
        self.handle(events.GatewayLost(gateway_id=gateway_id))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._tasks is None:
            work.close()
            raise RuntimeError("the service is not running")
        self._tasks.create_task(work)

    def _note_idleness(self) -> None:
        if self._state.is_idle:
            self.idle.set()
        else:
            self.idle.clear()


def _log_ends(action: actions.SendTokens) -> None:
    for token in action.tokens:
        if token.finish_reason is not None:
            text = "ended with token %d: %s"
            log.debug(text, token.index, token.finish_reason, extra=of(token.request_id))


def landing_ranges(
    blocks: Sequence[BlockId], layout: KvLayout, num_blocks: int
) -> list[tuple[int, int]]:
    """(offset, length) of all pieces of these blocks in a pool; neighbours as one range."""
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
