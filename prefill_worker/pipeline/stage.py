"""One stage of a group at work: its own layers of each step, from hidden states to hidden states or tokens.

The same for leader and followers, and for a worker alone, whose stage has all layers. The KV of the stage's layers
leaves for the decode worker while later layers compute. Hidden states carry their maker's checksum, as blocks do. Knows
neither requests' lives nor who drives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.batch import HiddenStates, Sampled, Slice
from prefill_worker.actions import SendBlocks, SlicePlan
from prefill_worker.landing import KvMemory, Route, StepWriter, Submit, block_runs
from prefill_worker.pipeline.hidden import HiddenInbox, HiddenOutbox

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
        given_checksum: int = 0,
    ) -> OwnStep:
        """Steps are computed in the order in which `OwnStep.compute` is called; `step` numbers a group's, and
        `given_checksum` is of the hidden states that it computes from. `on_prefix(layer)` waits, in the engine's
        thread, for what a layer looks at; it may raise PrefixLate."""
        return OwnStep(self, step, plans, on_prefix, given_checksum)

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
        given_checksum: int,
    ) -> None:
        self._given_checksum = given_checksum
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
        """On return the hidden states are where the next stage gets them. Raises what engine and transfer engine
        raise."""
        stage, step = self._stage, self._step
        if stage.inbox is None and stage.outbox is None:
            return await stage.engine.execute(
                self._slices, self._writer.on_layer, before_attention=self._on_prefix
            )
        hidden = HiddenStates(
            fetch=self._fetch if stage.inbox is not None else None,
            passed_on=stage.outbox.slot(step) if stage.outbox is not None else None,
        )
        return await stage.engine.execute(self._slices, self._writer.on_layer, hidden=hidden)

    def _fetch(self) -> memoryview:
        """In the engine's thread."""
        assert self._stage.inbox is not None, "the first stage has nobody before it"
        return self._stage.inbox.fetch(self._step, self._num_tokens, self._given_checksum)

    def hidden_checksum(self) -> int:
        """Of the hidden states that are left for the next stage, after `compute`; 0 where there is none."""
        outbox = self._stage.outbox
        return outbox.checksum(self._step, self._num_tokens) if outbox is not None else 0

    def checksums(self) -> Checksums:
        """After `compute`."""
        return self._writer.checksums()

    def finish(self) -> None:
        """Sends what is left, after `compute`."""
        self._writer.finish()

    async def sent(self, position: int) -> None:
        """Waits until no write of the slice at `position` is under way. Raises the first error."""
        await self._writer.sent(position)
