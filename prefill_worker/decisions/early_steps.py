"""Early steps (LOADING → RUNNING): which step begins before its prefix has loaded, and when its result counts.

While a prefix is read layer by layer, the tokens behind it are computed: the engine needs layer l of the prefix when it
reaches layer l. **A step begins early if it is not expected to wait**: the missing layers should arrive in less time
than the engine takes to reach the last of them. A step that began sooner would not end sooner, and the engine would
idle while other requests wait. So an early step has one member, waits for a bounded time only, and is given up after
that. Its prompt is then computed as usual, once the prefix has loaded.

**The result of an early step counts only after every loaded block has matched its writer's checksum**; it is held back
until then. If a block is corrupt or missing, the result is dropped and computed again, after the step's writes to the
decode worker, which has accepted none of them, have ended. `steps` runs the steps that are chosen here.
"""

from collections.abc import Callable

from moonserve.prefill_worker.decisions import events as ev
from moonserve.prefill_worker.decisions.preparation import make_ready
from moonserve.prefill_worker.decisions.sequence import EarlyStep, Phase, Sequence
from moonserve.prefill_worker.decisions.shared_state import SharedState
from moonserve.protocol.errors import MoonserveError


class EarlySteps:
    """Chooses and judges early steps. `on_computed` is called for a sequence whose early step counts."""

    def __init__(self, shared: SharedState, on_computed: Callable[[Sequence, ev.SliceDone, float], None]) -> None:
        self._shared = shared
        self._on_computed = on_computed
        self._begun: list[Sequence] = []

    def best_candidate(self, now: float) -> Sequence | None:
        """Returns the best-ranked sequence that may begin early now, or None."""
        loading = [s for s in self._shared.admitted.values() if self._may_begin(s, now)]
        return min(loading, key=lambda sequence: sequence.rank, default=None)

    def _may_begin(self, sequence: Sequence, now: float) -> bool:
        if sequence.phase is not Phase.LOADING or sequence.load_progress is None or sequence.was_early:
            return False
        start, end = self._span(sequence)
        return sequence.load_progress.fits_behind_loading(self._shared.loads.profile, start, end, now)

    def _span(self, sequence: Sequence) -> tuple[int, int]:
        start = sequence.num_computed + sequence.num_loading
        return start, min(start + self._shared.limits.max_num_batched_tokens, sequence.num_tokens)

    def begin(self, sequence: Sequence, now: float) -> tuple[int, float]:
        """Marks the sequence as running. Returns the end of its slice and the time that the engine may wait in it."""
        assert sequence.load_progress is not None, "only what arrives layer by layer begins early"
        start, end = self._span(sequence)
        sequence.early = EarlyStep(start=start, end=end, num_sent=sequence.num_sent)
        sequence.ready_at = sequence.started_at = now
        sequence.enter(Phase.RUNNING, now)
        self._begun.append(sequence)
        self._shared.counters["early_steps"] += 1
        return end, sequence.load_progress.remaining_s(now) + self._shared.limits.spare_wait_s

    def settle(self, now: float) -> None:
        """Advances the early sequences whose step and load have ended. Called after every event."""
        for sequence in tuple(self._begun):
            if sequence.phase not in (Phase.RUNNING, Phase.LOADING):
                self._begun.remove(sequence)  # the sequence has ended
                continue
            if sequence.early is not None:
                self._check_result(sequence, sequence.early, now)
            if sequence.phase is Phase.LOADING:
                self._return_to_ready(sequence, now)

    def _check_result(self, sequence: Sequence, early: EarlyStep, now: float) -> None:
        outcome, is_whole = early.outcome, sequence.num_computed >= early.start
        has_loaded = outcome is not None and not sequence.is_loading
        if early.is_given_up or (has_loaded and not is_whole):
            self._discard_result(sequence, early, now)
        elif outcome is not None and has_loaded:
            self._begun.remove(sequence)
            self._apply_result(sequence, early, outcome, now)

    def _discard_result(self, sequence: Sequence, early: EarlyStep, now: float) -> None:
        """Discards the result of an early step. Blocks that have loaded correctly are kept."""
        why = "given_up" if early.is_given_up else "spoilt"
        self._shared.counters[f"{why}_early_steps"] += 1
        sequence.num_sent = early.num_sent
        sequence.early, sequence.was_early = None, True
        sequence.enter(Phase.LOADING, now)

    def _return_to_ready(self, sequence: Sequence, now: float) -> None:
        """Makes the sequence READY once no write reads its blocks. If they were recomputed before, the target could
        receive old bytes after new ones."""
        if not sequence.is_loading and not sequence.num_sends:
            self._begun.remove(sequence)
            make_ready(self._shared, sequence, now)

    def _apply_result(
        self,
        sequence: Sequence,
        early: EarlyStep,
        outcome: ev.SliceDone | MoonserveError,
        now: float,
    ) -> None:
        sequence.early = None
        if isinstance(outcome, MoonserveError):
            self._shared.fail(sequence, outcome, now)
            return
        sequence.waited_s += early.waited_s
        sequence.compute_s += early.seconds - early.waited_s
        sequence.num_computed = early.end
        self._on_computed(sequence, outcome, now)

    def validate(self) -> None:
        """Raises AssertionError if a sequence that began early is missing here or listed twice."""
        assert len(set(self._begun)) == len(self._begun)
        early = {s for s in self._shared.admitted.values() if s.early and s.phase is Phase.RUNNING}
        assert early <= set(self._begun), "who began early is forgotten"
