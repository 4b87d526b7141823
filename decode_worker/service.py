"""I/O of the decode worker: performs the actions of `DecodeState` and reports their results to it as events.

Its rule: events are handled one after the other in the event loop's thread. An action that takes time is a task whose
result is the next event. The path of a token is: `stepping` → StepDone → SendTokens and the next RunStep.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from decode_worker import actions, events
from decode_worker.actions import GrantLease, Question
from decode_worker.state import DecodeState
from decode_worker.stepping import Stepping
from decode_worker.store_access import StoreAccess
from decode_worker.verify import BlockVerifier
from kvstore.client.blocks import BlockStores
from protocol.ids import BlockId, LeaseId
from protocol.layout import KvLayout
from protocol.logs import of
from protocol.pb import conductor_pb2
from protocol.tracing import Tracer
from transfer import TransferEngine
from worker.events import Action, Event
from worker.memory import KvMemory
from worker.service import WorkerService

if TYPE_CHECKING:
    from engine.runtime import EngineThread  # imports torch

log = logging.getLogger(__name__)


class DecodeService(WorkerService):
    """The I/O shell of a decode worker, called by the servicers. Call `finish` before `stop`."""

    state: DecodeState

    def __init__(
        self,
        state: DecodeState,
        compute: EngineThread,
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
        self._store_access: StoreAccess | None = None
        if stores is not None:
            self._store_access = StoreAccess(stores, memory, self._verifier)
        self._observe_allocation = observe_allocation
        self._stepping = Stepping(compute, clock)
        self._windows: dict[LeaseId, int] = {}  # window ids of open windows
        self._questions: dict[tuple[Question, LeaseId], list[asyncio.Future[Any]]] = {}

    def _role_performers(self) -> Mapping[type[Action], Callable[[Any], object]]:
        return {
            actions.CloseWindow: self._starts(self._close_window),
            actions.GrantLease: self._grant,
            actions.ConfirmRenewal: lambda action: self._answer(Question.RENEW, action.lease_id),
            actions.VerifyBlocks: self._starts(self._verify),
            actions.AnswerCommit: lambda action: self._answer(Question.COMMIT, action.lease_id, action.corrupt),
            actions.Refuse: self._refuse,
            actions.RunStep: self._run_step,
            actions.SendTokens: self._send_tokens,
            actions.KeepBlocks: self._starts(self._keep),
            actions.LoadBlocks: self._starts(self._load_back),
        }

    def drain(self, draining: bool) -> None:
        super().drain(draining)
        self.post(events.Draining(is_on=draining))

    async def finish(self) -> None:
        """Fails the remaining requests and waits until all windows are closed."""
        if not self.failed.done():
            self.post(events.Stopped())
            await self._operations.ended()

    def load(self) -> conductor_pb2.Load:
        load, state = super().load(), self.state
        load.leased_blocks = state.num_leased_blocks
        load.context_tokens = state.context_tokens
        load.num_preemptions = state.counters.num_preemptions
        load.steps.CopyFrom(self._stepping.counted)
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
            answer: tuple[GrantLease, int | None] = await self._ask(Question.RESERVE, event.lease_id, event)
        except asyncio.CancelledError:
            if (Question.RESERVE, event.lease_id) not in self._questions:
                self.post(events.ReserveWithdrawn(lease_id=event.lease_id))
            raise
        self._observe_allocation(self._clock() - asked_at)
        return answer

    async def renew(self, event: events.LeaseRenewed) -> None:
        await self._ask(Question.RENEW, event.lease_id, event)

    async def commit(self, event: events.CommitRequested) -> tuple[int, ...]:
        """Returns the indexes of the corrupt blocks. If there are none, this worker now owns the request."""
        corrupt: tuple[int, ...] = await self._ask(Question.COMMIT, event.lease_id, event)
        return corrupt

    async def _ask(self, question: Question, lease_id: LeaseId, event: Event) -> Any:
        """Posts the event and waits for its answer. Several calls may wait for the same answer: a caller that lost its
        connection calls again."""
        key = (question, lease_id)
        future = asyncio.get_running_loop().create_future()
        self._questions.setdefault(key, []).append(future)
        try:
            self.post(event)
            return await future
        finally:
            waiting = self._questions.get(key, [])
            if future in waiting:
                waiting.remove(future)
                if not waiting:
                    del self._questions[key]

    def _answer(self, question: Question, lease_id: LeaseId, answer: Any = None) -> None:
        for future in self._questions.pop((question, lease_id), ()):
            if not future.done():
                future.set_result(answer)

    def _refuse(self, action: actions.Refuse) -> None:
        for future in self._questions.pop((action.question, action.lease_id), ()):
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
        self._answer(Question.RESERVE, action.lease_id, (action, window_id))

    async def _close_window(self, action: actions.CloseWindow) -> Event:
        # Closing blocks until the stores in flight end, so it runs in another thread.
        await asyncio.to_thread(self._transfer.close_window, self._windows.pop(action.lease_id))
        await self._memory.staging.load(action.landed)
        return events.WindowClosed(lease_id=action.lease_id)

    async def _verify(self, action: actions.VerifyBlocks) -> Event:
        verdict = await self._verifier.examine(action.blocks)
        corrupt = verdict.corrupt
        if corrupt:
            text = "%d of %d landed blocks are corrupt"
            log.warning(text, len(corrupt), len(action.blocks), extra=of(action.request_id))
        return events.Verified(lease_id=action.lease_id, corrupt=corrupt, checksums=verdict.checksums)

    async def _run_steps(self) -> None:
        async for outcome in self._stepping.outcomes():
            self.post(outcome)

    def _run_step(self, action: actions.RunStep) -> None:
        if self._stepping.add(action.slices):
            self._operations.start(self._run_steps())

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

    async def _keep(self, action: actions.KeepBlocks) -> None:
        assert self._store_access is not None, "no home, nothing to keep"
        outcome = await self._store_access.keep(action)
        self.post(outcome)
        if outcome.error is not None:
            self._look_for_home()

    async def _load_back(self, action: actions.LoadBlocks) -> Event:
        assert self._store_access is not None, "no home, nothing was kept"
        return await self._store_access.load(action)


def _log_ends(action: actions.SendTokens) -> None:
    for token in action.tokens:
        if token.finish_reason is not None:
            text = "ended with token %d: %s"
            log.debug(text, token.index, token.finish_reason, extra=of(token.request_id))


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
