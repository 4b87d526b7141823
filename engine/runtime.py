"""Dedicated thread that runs the engine, so that the event loop stays responsive while a step computes.

torch releases the interpreter lock inside its operations. A single thread keeps steps in order and is the engine's only
caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from engine.batch import HiddenStates, Sampled, Slice
from engine.drawn import BegunStep
from engine.engine import Engine
from engine.staging import uninterrupted
from protocol.request import SamplingParams

T = TypeVar("T")


class EngineThread:
    """Asynchronous interface to an `Engine`. Steps run one after another, in the order of the calls."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    async def execute(
        self,
        slices: Sequence[Slice],
        on_layer: Callable[[int], None] | None = None,
        *,
        before_attention: Callable[[int], None] | None = None,
        hidden: HiddenStates | None = None,
    ) -> list[Sampled | None]:
        """Runs `Engine.execute` in the engine's thread; its callbacks run there too. A step cannot be interrupted: if
        the caller is cancelled, the call waits for the end of the step before it re-raises, so that blocks are never
        released while the step writes to them."""
        step = partial(self.engine.execute, slices, on_layer, before_attention=before_attention, hidden=hidden)
        return await uninterrupted(self._executor, step)

    async def begin(self, slices: Sequence[Slice]) -> BegunStep:
        """Runs `Engine.begin` in the engine's thread. Steps must be passed to `end` in the order of these calls."""
        return await uninterrupted(self._executor, partial(self.engine.begin, slices))

    async def end(self, step: BegunStep) -> list[Sampled | None]:
        """Runs `BegunStep.end` in the engine's thread. Cancellation is handled like in `execute`."""
        return await uninterrupted(self._executor, step.end)

    async def prepare(self, sampling: SamplingParams) -> None:
        """Compiles a request's grammar, if it has one, in another thread, so that no step waits for it. Raises
        InvalidRequest for a grammar that the engine does not support."""
        if sampling.grammar and self.engine.grammars is not None:
            await asyncio.to_thread(self.engine.grammars.prepare, sampling.grammar)

    def execute_here(self, slices: Sequence[Slice]) -> list[Sampled | None]:
        """Runs `Engine.execute` in the caller's thread, for steps that are shorter than waking another thread. Only for
        a caller that never has two steps in flight."""
        return self.engine.execute(slices, None)

    async def run(self, function: Callable[[], T]) -> T:
        """Runs `function` between steps, for work that needs exclusive use of the engine, such as a measurement."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def close(self) -> None:
        """Waits for the running step and ends the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)
