"""Execution of a decode worker's steps on the engine. Steps end in the order in which they are requested.

A single step is computed in one call, in the event loop's thread if steps are short. Two steps are begun one behind the
other, so that a GPU has the second when it has finished the first. Each is then awaited in the engine's thread, while
the event loop sends the tokens of the step before it. Knows no sequences.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moonserve.decode_worker.decisions.events import StepDone, StepFailed
from moonserve.engine.model.batch import Sampled, Slice
from moonserve.protocol.errors import MoonserveError, PeerError
from moonserve.protocol.pb import conductor_pb2
from moonserve.protocol.process.logs import requests_extra
from moonserve.worker.service import StepLog

if TYPE_CHECKING:
    from moonserve.engine.engine import EngineThread  # imports torch

log = logging.getLogger(__name__)

# Handing a step to the engine's thread and back wakes two sleeping threads, which took 1 to 2 ms per step on a virtual
# machine with idle cores (LOG.md). Steps as short as this run in the event loop's thread instead.
INLINE_STEP_S = 0.02
# Iterations of the event loop until tokens have been passed to gRPC: outbox, servicer, call.
TURNS_TO_SEND = 3

Slices = Sequence[Slice]


@dataclass(frozen=True, slots=True)
class _BegunStep:
    slices: Slices
    began_at: float
    step: Any  # a `BegunStep`, or the exception that `begin` raised


class StepRunner:
    """A queue of steps and their outcomes. If `add` returns True the caller must consume `outcomes`. An exception in a
    step fails only that step's requests."""

    def __init__(self, compute: "EngineThread", clock: Callable[[], float], log: StepLog) -> None:
        self.step_totals = conductor_pb2.Steps()  # steps with one token per sequence, since the start
        self._compute = compute
        self._clock = clock
        self._log = log
        self._due: deque[Slices] = deque()
        self._begun: deque[_BegunStep] = deque()
        self._is_taken = False  # a consumer of `outcomes` is running
        self._step_s = 0.0  # how long the latest step took
        self._ended_at = 0.0

    def add(self, slices: Slices) -> bool:
        """Queues a step. Returns True if the caller must start to consume `outcomes`."""
        self._due.append(slices)
        is_first, self._is_taken = not self._is_taken, True
        return is_first

    async def outcomes(self) -> AsyncIterator[StepDone | StepFailed]:
        """Runs queued steps and yields their outcomes until the queue is empty. Steps that are added while the caller
        handles an outcome are run, too."""
        try:
            while self._due or self._begun:
                if self._due and (self._begun or len(self._due) > 1):
                    self._begun.append(await self._begin(self._due.popleft()))
                elif self._begun:
                    begun = self._begun.popleft()
                    yield await self._outcome(self._end(begun), begun.slices)
                else:
                    slices = self._due.popleft()
                    yield await self._outcome(self._execute(slices), slices)
        finally:
            self._is_taken = False

    async def _outcome(self, step: Awaitable[list[Sampled | None]], slices: Slices) -> StepDone | StepFailed:
        try:
            return StepDone(sampled=await step)
        except MoonserveError as error:
            log.error("a step failed: %s", error, extra=_request_extra(slices))
            return StepFailed(error=error)
        except Exception as error:  # an error of the engine must fail only these requests
            log.exception("a step failed", extra=_request_extra(slices))
            failure = PeerError("the decode engine failed")
            failure.__cause__ = error
            return StepFailed(error=failure)

    async def _execute(self, slices: Slices) -> list[Sampled | None]:
        if self._step_s > INLINE_STEP_S:
            began_at = self._clock()
            sampled = await self._compute.execute(slices)
        else:
            for _ in range(TURNS_TO_SEND):
                await asyncio.sleep(0)
            began_at = self._clock()
            sampled = self._compute.execute_inline(slices)
        self._count(slices, began_at)
        return sampled

    async def _begin(self, slices: Slices) -> _BegunStep:
        began_at = self._clock()
        try:
            step: Any = await self._compute.begin(slices)
        except Exception as error:  # raised by `_end`, in the order of steps
            step = error
        return _BegunStep(slices, began_at, step)

    async def _end(self, begun: _BegunStep) -> list[Sampled | None]:
        if isinstance(begun.step, Exception):
            raise begun.step
        sampled = await self._compute.end(begun.step)
        self._count(begun.slices, max(begun.began_at, self._ended_at))
        return sampled

    def _count(self, slices: Slices, began_at: float) -> None:
        """Records a step. Those with chunks or drafts are not in the totals, since profiles and the conductor's
        predictions are of steps with one token per sequence."""
        self._ended_at = self._clock()
        self._step_s = self._ended_at - began_at
        if self._log.add_slices(slices, began_at, self._ended_at):
            counted = self.step_totals
            counted.num_steps += 1
            counted.seconds += self._step_s
            counted.sequences += len(slices)
            counted.context_tokens += sum(each.end for each in slices)


def _request_extra(slices: Slices) -> Mapping[str, Any]:
    return requests_extra(each.request_id for each in slices)
