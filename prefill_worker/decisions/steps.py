"""Composition of prefill steps and handling of their results (READY → RUNNING).

One step is in flight at a time, or one per stage of a pipeline: the next chunk of a prompt follows one stage behind.
An engine that would idle computes a prompt while its landing is requested, alone in its steps; KV and first token wait
for the grant.

A step holds at most `max_num_batched_tokens` tokens, taken from sequences in rank order, so that a long prompt runs in
chunks. **A step in which a prompt ends is not filled up with part of the next one**, since the first token would wait
for it. Only prompts that end in the step join it, and only if the step that is saved is worth more than the wait
(`PrefillProfile.joins`): short prompts share steps, and so do long ones in a long queue.
"""

from collections.abc import Callable
from dataclasses import dataclass

from moonserve.engine.model.batch import MAX_SCORED_TOKENS, Slice
from moonserve.prefill_worker.decisions import events as ev
from moonserve.prefill_worker.decisions.early_steps import EarlySteps
from moonserve.prefill_worker.decisions.events import RunStep, SendFirstToken, SlicePlan
from moonserve.prefill_worker.decisions.preparation import send_computed
from moonserve.prefill_worker.decisions.sequence import PREPARED, RUNNABLE, Phase, Sequence
from moonserve.prefill_worker.decisions.shared_state import SharedState
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.request import PrefillReport, Token, finish_reason

MIN_PIPELINE_CHUNK_TOKENS = 16
"""Minimum tokens per chunk in a pipeline. A smaller chunk takes nearly as long: it still reads all weights and passes
all stages."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in flight."""

    members: tuple[Sequence, ...]
    ends: tuple[int, ...]  # end of each member's slice
    began_at: float

    def ends_of(self, sequence: Sequence) -> list[int]:
        return [e for s, e in zip(self.members, self.ends, strict=True) if s is sequence]


class Steps:
    """Runs the sequences of a shared. `on_computed` is called for each computed sequence that must be handed off."""

    def __init__(self, shared: SharedState, on_computed: Callable[[Sequence, float], None]) -> None:
        self._shared = shared
        self._on_computed = on_computed
        self._early = EarlySteps(shared, self._apply_result)
        self._in_flight: dict[int, _Step] = {}  # by step id, 0 to `num_stages` - 1
        self._last_done_at = 0.0

    def run(self, now: float) -> None:
        """Starts steps while fewer than `num_stages` are in flight and a sequence can run."""
        num_stages = self._shared.limits.num_stages
        while len(self._in_flight) < num_stages and self._start_step(now):
            pass

    def _start_step(self, now: float) -> bool:
        """Starts one step. Returns False if no sequence can run."""
        limits = self._shared.limits
        runnable = [
            s
            for s in self._shared.admitted.values()
            if s.phase in RUNNABLE and s.early is None and s.num_unplanned and not s.is_reserving
        ]
        runnable.sort(key=lambda sequence: sequence.rank)
        early = self._early.best_candidate(now)
        if early is not None and (not runnable or early.rank < runnable[0].rank):
            self._run_early(early, now)
            return True
        budget, scored = limits.max_num_batched_tokens, MAX_SCORED_TOKENS
        num_here = len(self._shared.queue) + sum(
            s.phase in PREPARED or (s.phase in RUNNABLE and s.num_unplanned > 0) for s in self._shared.admitted.values()
        )
        if not runnable and limits.computes_before_grant:
            runnable = self._without_landing()
        plans: list[SlicePlan] = []
        for sequence in runnable[: limits.max_num_seqs]:
            room = budget if sequence.scores is None else min(budget, scored)
            if plans and not self._joins(sequence, room, len(plans), num_here - len(plans)):
                break
            if sequence.phase is not Phase.RUNNING:
                self._start(sequence, now)
            num_tokens = min(room, sequence.num_unplanned)
            if len(runnable) == 1:
                left = sequence.num_tokens - sequence.num_computed
                num_tokens = min(num_tokens, pipeline_chunk_tokens(left, limits.num_stages))
            plan = plan_slice(sequence, num_tokens, limits.block_size)
            budget -= plan.slice.num_tokens
            scored -= plan.slice.num_tokens if sequence.scores is not None else 0
            plans.append(plan)
        if plans:
            self._begin(tuple(runnable[: len(plans)]), tuple(plans), None, now)
        return bool(plans)

    def _without_landing(self) -> list[Sequence]:
        """Returns the sequence that an idle engine computes while its landing is requested, or none. It is alone in its
        step, to which `SendStep` refers."""
        admitted = [s for s in self._shared.admitted.values() if s.phase in (Phase.RESERVING, Phase.RUNNING)]
        waiting = [s for s in admitted if s.is_reserving and not s.is_loading and s.num_unplanned]
        return sorted(waiting, key=lambda sequence: sequence.rank)[:1]

    def _begin(
        self,
        members: tuple[Sequence, ...],
        plans: tuple[SlicePlan, ...],
        max_wait_s: float | None,
        now: float,
    ) -> None:
        step_id = next(i for i in range(len(self._in_flight) + 1) if i not in self._in_flight)
        self._in_flight[step_id] = _Step(members, tuple(plan.slice.end for plan in plans), now)
        self._shared.out.append(RunStep(plans=plans, step_id=step_id, max_wait_s=max_wait_s))

    def _run_early(self, sequence: Sequence, now: float) -> None:
        """Starts an early step. It has no other members, so no loaded sequence waits for another's blocks."""
        end, max_wait_s = self._early.begin(sequence, now)
        assert sequence.early is not None, "it has begun"
        plan = plan_slice(sequence, end - sequence.early.start, self._shared.limits.block_size)
        self._begin((sequence,), (plan,), max_wait_s, now)

    def settle(self, now: float) -> None:
        """Advances early steps whose prefix has been verified or has failed. Called after every event."""
        self._early.settle(now)

    def _joins(self, sequence: Sequence, budget: int, num_ending: int, num_waiting: int) -> bool:
        """Returns True if the rest of a sequence joins a step in which other sequences end."""
        return sequence.num_unplanned <= budget and self._shared.loads.profile.is_worth_joining(
            sequence.num_tokens,
            sequence.num_planned,
            num_delayed=num_ending,
            num_waiting=num_waiting,
        )

    def _start(self, sequence: Sequence, now: float) -> None:
        if sequence.is_reserving:
            sequence.ready_at = now
        if sequence.num_corrupt == 0:
            sequence.started_at = now
            self._reuse_new_cached_blocks(sequence)
        sequence.enter(Phase.RUNNING, now)

    def _reuse_new_cached_blocks(self, sequence: Sequence) -> None:
        """Replaces blocks by cached ones that earlier sequences have computed since this one got its blocks."""
        pool, table = self._shared.pool, sequence.block_table
        block_size = self._shared.limits.block_size
        first = sequence.num_computed // block_size
        cached = pool.match_prefix(sequence.usable_keys(block_size))
        if len(cached) <= first:
            return
        pool.retain(cached[first:])
        pool.count_hits(cached[first:])
        pool.release(table[first : len(cached)])
        table[first : len(cached)] = cached[first:]
        self._shared.adopt_cached(sequence, first, len(cached))
        send_computed(self._shared, sequence)

    def on_step_done(self, event: ev.StepDone, now: float) -> None:
        step = self._in_flight.pop(event.step_id)
        # In a pipeline a step waits for the steps before it, so its own time begins when the last one ended.
        began_at, self._last_done_at = max(step.began_at, self._last_done_at), now
        early = step.members[0].early
        if early is None:
            self._divide_time(step, now - began_at)
        for sequence, end, result in zip(step.members, step.ends, event.slices, strict=True):
            sequence.slice_ends_in_flight.remove(end)
            if early is not None:
                early.record_result(result, waited_s=event.waited_s, seconds=now - began_at)
                self._shared.close_if_unused(sequence, now)
                continue
            sequence.num_computed = end
            self._apply_result(sequence, result, now)

    def _apply_result(self, sequence: Sequence, result: ev.SliceDone, now: float) -> None:
        """Applies the result of a sequence's slice: publishes blocks and finishes a sequence that is computed."""
        for index, checksum in result.checksums if not sequence.is_invalid else ():
            self._shared.publish(sequence, index, checksum)
        self._shared.counters["computed_slices"] += 1
        if sequence.phase is Phase.CLOSING:
            self._shared.close_if_unused(sequence, now)
        elif sequence.num_left == 0:
            self._finish(sequence, result, now)

    def on_step_given_up(self, _event: ev.StepGivenUp, now: float) -> None:
        """Handles an early step that waited too long for its prefix. It is the only step and has one member."""
        _, step = self._in_flight.popitem()
        (sequence,) = step.members
        assert sequence.early is not None, "only a step that began early waits"
        sequence.slice_ends_in_flight.clear()
        sequence.early.is_given_up = True
        self._shared.close_if_unused(sequence, now)

    def _divide_time(self, step: _Step, seconds: float) -> None:
        """Divides a step's time among its members by their predicted times. Otherwise predictions for short prompts
        would learn the times of long ones."""
        profile = self._shared.loads.profile
        spans = zip(step.members, step.ends, strict=True)
        parts = [profile.seconds(end, sequence.num_computed) for sequence, end in spans]
        total = sum(parts)
        for sequence, part in zip(step.members, parts, strict=True):
            sequence.compute_s += seconds * (part / total if total else 1 / len(parts))

    def on_step_failed(self, event: ev.StepFailed, now: float) -> None:
        """Handles a failed step. Its members fail, since the content of their blocks is undefined."""
        step = self._in_flight.pop(event.step_id)
        self._shared.counters["failed_steps"] += 1
        for sequence, end in zip(step.members, step.ends, strict=True):
            sequence.slice_ends_in_flight.remove(end)
            sequence.is_invalid = True
            if sequence.early is not None and sequence.phase is Phase.RUNNING:
                sequence.early.record_result(event.error)  # unverified bytes of the prefix may have caused it
            else:
                self._shared.fail(sequence, event.error, now)

    def finish_held(self, sequence: Sequence, now: float) -> None:
        """Finishes a sequence that was computed before its landing was granted."""
        result, sequence.held_result = sequence.held_result, None
        assert result is not None, "it was computed"
        self._finish(sequence, result, now)

    def _finish(self, sequence: Sequence, result: ev.SliceDone, now: float) -> None:
        """Finishes a computed sequence. Sends its first token, unless it was sent before a corrupt handoff. While the
        landing is requested, the result is held: a decode worker may yet refuse the request."""
        if sequence.is_reserving:
            sequence.held_result = result
            return
        sampled = result.sampled
        if sequence.first_token is None and sampled is not None and sampled.failure is not None:
            self._shared.fail(sequence, InvalidRequest(sampled.failure), now)
            return
        token = sequence.first_token or self._emit_first_token(sequence, result, now)
        if token.finish_reason is None:
            self._on_computed(sequence, now)
            return
        self._shared.counters["finished_requests"] += 1
        self._shared.end(sequence, now)

    def _emit_first_token(self, sequence: Sequence, result: ev.SliceDone, now: float) -> Token:
        request, sampled = sequence.request, result.sampled
        sequence.first_token_at = now
        assert sampled is not None, "the last slice of a prompt samples"
        sequence.first_token = token = Token(
            request_id=request.request_id,
            index=request.first_index,
            token_id=sampled.token_id,
            logprobs=sampled.logprobs,
            finish_reason=finish_reason(request.sampling, request.first_index, sampled.token_id),
        )
        report = prefill_report(sequence, now)
        self._shared.out.append(
            SendFirstToken(
                gateway_id=request.gateway_id,
                token=token,
                report=report,
                traceparent=request.traceparent,
            )
        )
        return token

    def validate(self) -> None:
        """Raises AssertionError if the steps and their members disagree."""
        self._early.validate()
        assert all(0 <= step_id < self._shared.limits.num_stages for step_id in self._in_flight)
        for sequence in self._shared.admitted.values():
            ends = sorted(end for step in self._in_flight.values() for end in step.ends_of(sequence))
            assert ends == sequence.slice_ends_in_flight, "waits for no step, or not in order"


def pipeline_chunk_tokens(num_left: int, num_stages: int) -> int:
    """Returns the tokens of the next chunk of a prompt that alone must keep a pipeline's stages busy: an equal share of
    `num_left` per stage, at least MIN_PIPELINE_CHUNK_TOKENS. `num_left` includes tokens in flight."""
    return num_left if num_stages == 1 else max(MIN_PIPELINE_CHUNK_TOKENS, -(-num_left // num_stages))


def plan_slice(sequence: Sequence, num_tokens: int, block_size: int) -> SlicePlan:
    """Plans the next `num_tokens` tokens of a sequence and records them in the sequence as in flight."""
    request, start = sequence.request, sequence.num_planned
    if sequence.early is not None:
        start = sequence.early.start
    end = start + num_tokens
    sequence.slice_ends_in_flight.append(end)
    landing = sequence.landing if end > sequence.num_sent else None
    send_from = sequence.num_sent if sequence.early is None else max(start, sequence.num_sent)
    if landing is not None:
        sequence.num_sends += 1
        sequence.num_sent = end
    is_last = end == sequence.num_tokens
    complete = range(start // block_size, -(-end // block_size) if is_last else end // block_size)
    return SlicePlan(
        slice=Slice(
            request_id=request.request_id,
            token_ids=request.token_ids,
            start=start,
            end=end,
            block_table=tuple(sequence.block_table),
            sampling=request.sampling,
            num_prompt_tokens=request.num_prompt_tokens,
            samples=is_last and sequence.first_token is None,
            scores=sequence.scores if sequence.first_token is None else None,
        ),
        landing=landing,
        send_from=send_from,
        complete=tuple(complete),
    )


def prefill_report(sequence: Sequence, now: float) -> PrefillReport:
    """Returns the report of a prompt's times. Queueing, loading and computing add up to the time since the submission.
    Loading is the delay by the prefix, without the engine's computing meanwhile. Time in which other prompts use the
    engine, in their own steps or in shared ones, counts as queueing."""
    load_s = sequence.ready_at - sequence.admitted_at + sequence.waited_s
    compute_s = sequence.compute_s
    return PrefillReport(
        request_id=sequence.request_id,
        cached_tokens=sequence.num_cached,
        queue_s=max(now - sequence.submitted_at - load_s - compute_s, 0.0),
        load_s=load_s,
        compute_s=compute_s,
        prompt_logprobs=None if sequence.scores is None else sequence.scores.result(),
    )
