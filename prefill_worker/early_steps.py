"""LOADING → RUNNING: which sequence's step begins before its prefix is there, and when what it computed counts.

A prefix that is read layer by layer is computed behind while it arrives: the engine needs layer l of it when it gets to
layer l. **A step begins early when no waiting is foreseen in it**: the layers that are missing should take less time to
arrive than the engine takes to get to the last of them. Beginning sooner would not end sooner, and the engine would
stand still while others wait. So a step that begins early has one member, may wait for a bounded time only, and is
given up beyond it; its prompt then goes the usual way, once all is loaded.

**Nothing that such a step computed counts before every loaded block has matched its writer's checksum**: its outcome
is put aside until then. Where a block is bad, or did not come, the outcome is dropped and computed again, after its
writes to the decode worker, which nobody has accepted, have ended. `steps` runs what is chosen here.
"""

from __future__ import annotations

from collections.abc import Callable

from prefill_worker import events as ev
from prefill_worker.ledger import Ledger
from prefill_worker.preparation import make_ready
from prefill_worker.sequence import EarlyStep, Phase, Sequence
from protocol.errors import MoonserveError


class EarlySteps:
    """`on_computed` takes over a sequence whose early step counts."""

    def __init__(self, ledger: Ledger, on_computed: Callable[[Sequence, ev.SliceDone, float], None]) -> None:
        self._ledger = ledger
        self._on_computed = on_computed
        self._begun: list[Sequence] = []

    def best(self, now: float) -> Sequence | None:
        """The first in rank that may begin now."""
        loading = [s for s in self._ledger.admitted.values() if self._may_begin(s, now)]
        return min(loading, key=lambda sequence: sequence.rank, default=None)

    def _may_begin(self, sequence: Sequence, now: float) -> bool:
        if sequence.phase is not Phase.LOADING or sequence.arrival is None or sequence.was_early:
            return False
        start, end = self._span(sequence)
        return sequence.arrival.hides(self._ledger.loads.profile, start, end, now)

    def _span(self, sequence: Sequence) -> tuple[int, int]:
        start = sequence.num_computed + sequence.num_loading
        return start, min(start + self._ledger.limits.max_num_batched_tokens, sequence.num_tokens)

    def begin(self, sequence: Sequence, now: float) -> tuple[int, float]:
        """The sequence runs. Gives the end of its slice, and how long the engine may wait in it."""
        assert sequence.arrival is not None, "only what arrives layer by layer begins early"
        start, end = self._span(sequence)
        sequence.early = EarlyStep(start=start, end=end, num_sent=sequence.num_sent)
        sequence.ready_at = sequence.started_at = now
        sequence.enter(Phase.RUNNING, now)
        self._begun.append(sequence)
        self._ledger.counters["early_steps"] += 1
        return end, sequence.arrival.left_s(now) + self._ledger.limits.spare_wait_s

    def settle(self, now: float) -> None:
        """After every event: moves on whoever has what it waited for."""
        for sequence in tuple(self._begun):
            if sequence.phase not in (Phase.RUNNING, Phase.LOADING):
                self._begun.remove(sequence)  # it ended
                continue
            if sequence.early is not None:
                self._judge(sequence, sequence.early, now)
            if sequence.phase is Phase.LOADING:
                self._ready_again(sequence, now)

    def _judge(self, sequence: Sequence, early: EarlyStep, now: float) -> None:
        outcome, is_whole = early.outcome, sequence.num_computed >= early.start
        has_loaded = outcome is not None and not sequence.is_loading
        if early.is_given_up or (has_loaded and not is_whole):
            self._drop(sequence, early, now)
        elif outcome is not None and has_loaded:
            self._begun.remove(sequence)
            self._count(sequence, early, outcome, now)

    def _drop(self, sequence: Sequence, early: EarlyStep, now: float) -> None:
        """What was computed is of no use, but what has loaded well is."""
        why = "given_up" if early.is_given_up else "spoilt"
        self._ledger.counters[f"{why}_early_steps"] += 1
        sequence.num_sent = early.num_sent
        sequence.early, sequence.was_early = None, True
        sequence.enter(Phase.LOADING, now)

    def _ready_again(self, sequence: Sequence, now: float) -> None:
        """Its blocks may be computed over once no write reads them: the target would see old bytes after new ones."""
        if not sequence.is_loading and not sequence.num_sends:
            self._begun.remove(sequence)
            make_ready(self._ledger, sequence, now)

    def _count(
        self,
        sequence: Sequence,
        early: EarlyStep,
        outcome: ev.SliceDone | MoonserveError,
        now: float,
    ) -> None:
        sequence.early = None
        if isinstance(outcome, MoonserveError):
            self._ledger.fail(sequence, outcome, now)
            return
        sequence.waited_s += early.waited_s
        sequence.compute_s += early.seconds - early.waited_s
        sequence.num_computed = early.end
        self._on_computed(sequence, outcome, now)

    def validate(self) -> None:
        """Raises AssertionError when who began early is not known here, or is twice."""
        assert len(set(self._begun)) == len(self._begun)
        early = {s for s in self._ledger.admitted.values() if s.early and s.phase is Phase.RUNNING}
        assert early <= set(self._begun), "who began early is forgotten"
