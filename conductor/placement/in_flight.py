"""Placed requests whose end is not reported yet: the load that they add, and the corrections that their reports give.

Rule: the load that a placement adds is removed exactly once, by the report of its first token or of its end, by a new
placement of the same request, or when it expires. Predictions are kept with each request, so that reports of actual
times correct later predictions. Pure; knows neither members nor how a choice is made.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moonserve.conductor.events import Place, Report
from moonserve.conductor.members import Instance
from moonserve.conductor.placement.candidates import QueueTerms
from moonserve.conductor.placement.decision import Decision, Outcome
from moonserve.conductor.placement.tenant_fairness import Fairness
from moonserve.conductor.prediction.accuracy import Times
from moonserve.conductor.prediction.learned_estimates import LearnedEstimates
from moonserve.conductor.prediction.transfer_time import Transfers
from moonserve.protocol.request import PrefixSource, RequestId, RequestPhase, Role


class PlacementPlan(NamedTuple):
    """A decision with the instances it names."""

    decision: Decision
    prefill: Instance
    decode: Instance
    sources: tuple[PrefixSource, ...]
    reads: tuple[tuple[Instance, int], ...]  # blocks to read from each store
    predicted: Times
    prefill_s: float  # predicted service time
    rank: float  # in the prefill queue
    queueing: QueueTerms
    uncached_tokens: int
    needed_blocks: int
    block_bytes: int
    step_s: float  # predicted time between its tokens
    predicted_seqs: float  # already placed sequences predicted to run when it lands


@dataclass(slots=True, eq=False, kw_only=True)
class InFlightRequest:
    """A placed request whose end was not reported."""

    placed_at: float
    prefill: Instance  # the same as `decode` if the decode worker prefills the prompt itself
    decode: Instance
    reads: tuple[tuple[Instance, int], ...]  # blocks to read from stores; empty once prefilled
    predicted: Times
    predicted_tbt_s: float
    predicted_seqs: float  # already placed sequences predicted at its decode instance when it lands
    waits_for_landing_only: (
        bool  # waits before prefill only for the landing's grant: no prefix to load, and blocks were free
    )
    num_prompt_tokens: int
    max_tokens: int
    tenant: str
    ttft_s: float | None = None  # None until the first token is reported
    cached_tokens: int | None = None  # None until the first token is reported


class InFlightRequests:
    """All flights, in order of placement."""

    def __init__(self, learned: LearnedEstimates, transfers: Transfers, fairness: Fairness, ttl_s: float) -> None:
        """`ttl_s`: a placement whose end was not reported expires after this."""
        self._learned = learned
        self._transfers = transfers
        self._fairness = fairness
        self._ttl_s = ttl_s
        self._flights: dict[RequestId, InFlightRequest] = {}
        self._no_expiry_before = -math.inf  # no flight expires before this
        self._num_placements = 0

    def find(self, request_id: RequestId) -> InFlightRequest | None:
        return self._flights.get(request_id)

    def begin(self, place: Place, plan: PlacementPlan, now: float) -> None:
        """Starts a flight and adds its load. No flight of this id may exist."""
        self._num_placements += 1
        prefill, decode = plan.prefill, plan.decode
        prefill.choose(self._num_placements)
        decode.choose(self._num_placements)
        rank = plan.rank + plan.queueing.shift_s
        prefill.queue.add(place.request_id, plan.prefill_s, plan.uncached_tokens, now, rank)
        prefill.write_prefill_queue()
        self._fairness.charge(
            place.request_id,
            plan.queueing.standing,
            prompt_tokens=plan.uncached_tokens,
            output_tokens=plan.decision.expected_output,
            place=now + rank,
            link=prefill.link,
            priority=plan.queueing.priority,
        )
        decode.decode.add(
            place.request_id,
            tokens=place.num_prompt_tokens,
            max_tokens=place.max_tokens,
            blocks=plan.needed_blocks,
            begins_at=now + plan.decision.predicted_ttft_s,
            step_s=plan.step_s,
            expected_output=plan.decision.expected_output,
        )
        for store, num_blocks in plan.reads:
            store.add_reads(num_blocks)
        links = [(store.link, num_blocks * plan.block_bytes) for store, num_blocks in plan.reads]
        self._transfers.begin(place.request_id, links, prefill.link, now)
        self._flights[place.request_id] = InFlightRequest(
            placed_at=now,
            prefill=prefill,
            decode=decode,
            reads=plan.reads,
            predicted=plan.predicted,
            predicted_tbt_s=plan.decision.predicted_tbt_s,
            predicted_seqs=plan.predicted_seqs,
            waits_for_landing_only=not (
                plan.decision.is_undivided or plan.predicted.transfer_s or plan.decision.predicted_landing_wait_s
            ),
            num_prompt_tokens=place.num_prompt_tokens,
            max_tokens=place.max_tokens,
            tenant=place.tenant,
        )

    def first_token(self, report: Report, flight: InFlightRequest, now: float) -> None:
        """Applies the first report of a first token: ends the prefill load and corrects all learned predictions."""
        flight.ttft_s, flight.cached_tokens = report.elapsed_s, report.cached_tokens
        self._end_prefill(report.request_id, flight, now)
        surplus = flight.decode.decode.num_running - flight.predicted_seqs
        self._learned.overtaking.observe(now - flight.placed_at, surplus)
        flight.decode.decode.start(report.request_id, now)
        if report.prefill_s is not None:
            flight.prefill.observe_prefill(flight.num_prompt_tokens, report.cached_tokens, report.prefill_s, now)
        actual = Times(
            ttft_s=report.elapsed_s,
            queue_s=report.queue_s,
            transfer_s=report.transfer_s,
            prefill_s=report.prefill_s,
        )
        self._learned.accuracy.observe(flight.predicted, actual)
        self._learned.overhead.observe(actual, now, lands_only=flight.waits_for_landing_only)

    def end(self, request_id: RequestId, now: float, output_tokens: int | None = None) -> None:
        """Ends a flight and removes its load. `output_tokens`: None = unknown. Unknown ids are ignored."""
        flight = self._flights.pop(request_id, None)
        if flight is not None:
            self._fairness.settle(request_id, output_tokens)
            self._end_prefill(request_id, flight, now)
            flight.decode.decode.remove(request_id)

    def finished(self, report: Report, flight: InFlightRequest, now: float) -> None:
        """Ends a flight that finished normally, and records the length of its answer."""
        self._fairness.prefilled(report.request_id)  # its first token may not have been reported
        self.end(report.request_id, now, report.output_tokens)
        if flight.ttft_s is not None and report.output_tokens > 1:
            tbt_s = (report.elapsed_s - flight.ttft_s) / (report.output_tokens - 1)
            self._learned.tbt.observe(flight.predicted_tbt_s, tbt_s)
        self._learned.lengths.observe(
            report.output_tokens,
            max_tokens=flight.max_tokens,
            prompt_tokens=flight.num_prompt_tokens,
            tenant=flight.tenant,
        )

    def expire(self, now: float) -> Sequence[RequestId]:
        """Ends all expired flights and returns their ids. Returns at once if none can have expired, because finding a
        dictionary's first entry takes longer the more entries were removed before it."""
        gone: list[RequestId] = []
        if now <= self._no_expiry_before:
            return gone
        while self._flights:
            request_id, flight = next(iter(self._flights.items()))
            if now - flight.placed_at <= self._ttl_s:
                break
            self.end(request_id, now)
            gone.append(request_id)
        oldest = next((f.placed_at for f in self._flights.values()), now)
        self._no_expiry_before = oldest + self._ttl_s
        return gone

    def _end_prefill(self, request_id: RequestId, flight: InFlightRequest, now: float) -> None:
        flight.prefill.queue.remove(request_id, now)
        flight.prefill.write_prefill_queue()
        self._fairness.prefilled(request_id)
        self._transfers.end(request_id)
        for store, num_blocks in flight.reads:
            store.add_reads(-num_blocks)
        flight.reads = ()

    def validate(self, members: Iterable[Instance]) -> None:
        """Raises AssertionError if the queues and sums disagree with the flights."""
        flights = self._flights
        for instance in members:
            own = [r for r, f in flights.items() if f.decode is instance]
            assert len(instance.decode) == len(own)
            assert all(request_id in instance.decode for request_id in own)
            queued = [r for r, f in flights.items() if f.prefill is instance]
            queued = [r for r in queued if r in instance.queue]
            assert len(instance.queue) == len(queued), "a queue holds a request not in flight"
            assert all(map(self._fairness.waits, queued)), "a prompt waits without its tag"
            if instance.role is Role.STORE:
                reads = (n for f in flights.values() for s, n in f.reads if s is instance)
                assert instance.row_ref.table.pending_reads[instance.row_ref.row] == sum(reads)
        for request_id, flight in flights.items():
            assert flight.ttft_s is None or request_id not in flight.prefill.queue
            assert flight.ttft_s is None or not flight.reads


def outcome_of(report: Report, flight: InFlightRequest) -> Outcome:
    """Converts a report to the outcome that the decision record keeps."""
    ended = report.phase is not RequestPhase.FIRST_TOKEN
    return Outcome(
        phase=report.phase.value,
        ttft_s=flight.ttft_s,
        elapsed_s=report.elapsed_s,
        cached_tokens=flight.cached_tokens,
        output_tokens=report.output_tokens if ended else None,
        num_draft_tokens=report.num_draft_tokens,
        num_accepted_tokens=report.num_accepted_tokens,
        queue_s=report.queue_s,
        transfer_s=report.transfer_s,
        prefill_s=report.prefill_s,
    )
