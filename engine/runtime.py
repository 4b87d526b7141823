"""The engine's own thread, so that an event loop stays responsive while a step computes.

torch releases the interpreter lock inside its operations; one dedicated thread keeps steps in order and gives the
engine its single caller.
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
    """Steps run one after another in the order of the calls."""

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
        """`Engine.execute` in the engine's thread, where what it is given is called too. A step cannot be interrupted:
        when the caller is cancelled this waits for the step's end before it re-raises, so that blocks the step writes
        to are never released under it."""
        step = partial(self.engine.execute, slices, on_layer, before_attention=before_attention, hidden=hidden)
        return await uninterrupted(self._executor, step)

    async def begin(self, slices: Sequence[Slice]) -> BegunStep:
        """`Engine.begin` in the engine's thread; the step is `end`ed in the order of these calls."""
        return await uninterrupted(self._executor, partial(self.engine.begin, slices))

    async def end(self, step: BegunStep) -> list[Sampled | None]:
        """`BegunStep.end` in the engine's thread, as for `execute`."""
        return await uninterrupted(self._executor, step.end)

    async def prepare(self, sampling: SamplingParams) -> None:
        """Compiles a request's grammar, if it has one, beside the engine's thread: no step has to wait for that. Raises
        InvalidRequest for one that the engine cannot follow."""
        if sampling.grammar and self.engine.grammars is not None:
            await asyncio.to_thread(self.engine.grammars.prepare, sampling.grammar)

    def execute_here(self, slices: Sequence[Slice]) -> list[Sampled | None]:
        """`Engine.execute` in the caller's thread, for steps shorter than it takes to wake another one. Only for a
        caller that never has two steps under way."""
        return self.engine.execute(slices, None)

    async def run(self, function: Callable[[], T]) -> T:
        """Runs something that needs the engine to itself, such as a measurement, between steps."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def close(self) -> None:
        """Waits for the step under way and ends the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)
