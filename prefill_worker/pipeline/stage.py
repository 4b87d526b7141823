"""One stage of a group at work: its own layers of each step, from hidden states to hidden states or tokens.

The same for leader and followers, and for a worker alone, whose stage has all layers. The KV of the stage's layers
leaves for the decode worker while later layers compute. Knows neither requests' lives nor who drives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from engine.batch import HiddenStates, Sampled, Slice
from prefill_worker.actions import SendBlocks, SlicePlan
from prefill_worker.landing import KvMemory, Route, StepWriter, Submit, block_runs
from prefill_worker.pipeline.hidden import HiddenInbox, HiddenOutbox

# Longer than a step takes on any machine that could serve; one that is stopped must not hold requests for ever.
STEP_TIMEOUT_S = 60.0

Checksums = list[tuple[tuple[int, int], ...]]
"""Per slice: (index in the block table, checksum of the stage's layers) of the blocks that it completes."""


class StageEngine(Protocol):
    """`engine.runtime.EngineThread`."""

    async def execute(
        self,
        slices: Sequence[Slice],
        on_layer: Callable[[int], None] | None = None,
        *,
        before_attention: Callable[[int], None] | None = None,
        hidden: HiddenStates | None = None,
    ) -> list[Sampled | None]: ...


class OwnStage:
    """This process's share of the layers. `inbox` is None for the first stage, `outbox` for the last."""

    def __init__(
        self,
        engine: StageEngine,
        memory: KvMemory,
        submit: Submit,
        *,
        inbox: HiddenInbox | None = None,
        outbox: HiddenOutbox | None = None,
    ) -> None:
        self.engine = engine
        self.memory = memory
        self.submit = submit
        self.inbox = inbox
        self.outbox = outbox

    def begin(
        self,
        plans: Sequence[SlicePlan],
        on_prefix: Callable[[int], None] | None = None,
        *,
        step: int = 0,
    ) -> OwnStep:
        """Steps are computed in the order in which `OwnStep.compute` is called; `step` numbers a group's.
        `on_prefix(layer)` waits, in the engine's thread, for what a layer looks at; it may raise PrefixLate."""
        return OwnStep(self, step, plans, on_prefix)

    async def send_blocks(self, action: SendBlocks) -> None:
        """On return the stage's layers of whole blocks have arrived. Raises MoonserveError."""
        layout = self.memory.layout
        route = Route(self.memory, action.landing, block_runs(action.pairs, layout))
        await self.submit(route.transfer(range(layout.pieces_per_block)))


class OwnStep:
    """One step at this stage."""

    def __init__(
        self,
        stage: OwnStage,
        step: int,
        plans: Sequence[SlicePlan],
        on_prefix: Callable[[int], None] | None,
    ) -> None:
        self._num_tokens = sum(plan.slice.num_tokens for plan in plans)
        self._stage = stage
        self._step = step
        self._slices = [plan.slice for plan in plans]
        self._on_prefix = on_prefix
        self._writer = StepWriter(stage.memory, plans, stage.submit)

    @property
    def num_slices(self) -> int:
        return len(self._slices)

    async def compute(self) -> list[Sampled | None]:
        """On return the hidden states are where the next stage gets them. A stage behind the first waits for those of
        the one before. Raises what engine and transfer engine raise; the stages behind fail then, too."""
        stage = self._stage
        if stage.inbox is None and stage.outbox is None:
            return await stage.engine.execute(
                self._slices, self._writer.on_layer, before_attention=self._on_prefix
            )
        try:
            return await stage.engine.execute(
                self._slices, self._writer.on_layer, hidden=self._hidden(stage.inbox, stage.outbox)
            )
        except Exception:
            if stage.outbox is not None:
                stage.outbox.leave_nothing(self._step)
            raise

    def _hidden(self, inbox: HiddenInbox | None, outbox: HiddenOutbox | None) -> HiddenStates:
        step, num_tokens = self._step, self._num_tokens
        return HiddenStates(
            fetch=None if inbox is None else partial(inbox.fetch, step, num_tokens),
            passed_on=None if outbox is None else outbox.rows(step),
            on_passed=None if outbox is None else partial(outbox.leave, step, num_tokens),
        )

    def checksums(self) -> Checksums:
        """After `compute`."""
        return self._writer.checksums()

    def finish(self) -> None:
        """Sends what is left, after `compute`."""
        self._writer.finish()

    async def sent(self, position: int) -> None:
        """Waits until no write of the slice at `position` is under way. Raises the first error."""
        await self._writer.sent(position)
