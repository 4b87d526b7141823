"""The gateway's part of a request, like `gateway.generation.state`: place, place again after a loss, report, end.

It queries the conductor and updates the journeys. The effects of a placement on machines are left to `cluster`. A
rejection ends a request: `retry_after` is not followed. As in the live gateway, there are three attempts, instances
that failed are avoided, a lost incarnation that the conductor still offers is returned, and failed placements after a
loss are retried every `PAUSE_S` for `PATIENCE_S`. The gateway divides its time evenly among all new requests, so that
simultaneous ones are all late, including the first. The other overheads of a request pass in parallel.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from conductor.events import Phase as ReportPhase
from conductor.events import Place, Placed, Refused, Rejected, Report
from conductor.state import ConductorState
from protocol.errors import NoWorker, PeerLost
from protocol.ids import RequestId
from traces.simulator.clock import Timed
from traces.simulator.events import Arrive
from traces.simulator.events import Event as ClusterEvent
from traces.simulator.journey import Journey, Phase
from traces.simulator.prefill import Prompt
from traces.simulator.results import End
from traces.simulator.spec import LATE, ClusterSpec, Overheads

MAX_ATTEMPTS = 3  # as in `gateway.generation.state`, which does not count attempts that made progress
PATIENCE_S = 20.0
PAUSE_S = 0.25
DOUBT_S = 6.0

NO_SLO_S = 1e9


class Gateway:
    """Places and ends all requests of a trace."""

    def __init__(self, conductor: ConductorState, spec: ClusterSpec) -> None:
        self._conductor = conductor
        self._tbt_slo_s = NO_SLO_S if spec.admission == LATE else None
        self._max_model_len = spec.model.max_model_len
        self._num_stages = spec.prefill_group
        self.num_open = 0  # requests that have not ended

    def place(self, journey: Journey, now: float) -> bool:
        """Requests a placement. True = placed; otherwise the request has ended or is placed again after PAUSE_S."""
        place = Place(
            request_id=RequestId(journey.request_id),
            block_keys=journey.keys,
            num_prompt_tokens=journey.num_tokens,
            max_tokens=self._max_model_len - journey.num_tokens,  # the length of the answer is unknown
            tbt_slo_s=self._tbt_slo_s,
            excluded_instances=journey.excluded,
            tenant=journey.record.tenant,
            priority=journey.record.priority,
        )
        reply = self._conductor.handle(place, now)[-1]
        if isinstance(reply, Placed):
            return self._placed(journey, reply, now)
        assert isinstance(reply, Rejected | Refused)
        may_recover = isinstance(reply, Rejected) or isinstance(reply.error, NoWorker)
        reason = reply.reason if isinstance(reply, Rejected) else reply.error.code
        if journey.attempt > 1 and may_recover:
            if not isinstance(reply, Rejected):  # no other instance: only recently lost ones stay excluded
                journey.excluded = frozenset(name for (name, _), at in journey.lost.items() if now < at + DOUBT_S)
            self._pause(journey, reason, now)
        elif isinstance(reply, Rejected):
            journey.predicted_ttft_s = reply.predicted_ttft_s
            self.end(journey, End.REJECTED, reason, now)
        else:
            self.end(journey, End.FAILED, reason, now)
        return False

    def _placed(self, journey: Journey, reply: Placed, now: float) -> bool:
        placement = reply.placement
        doubted = [
            endpoint.instance_id
            for endpoint in (placement.prefill, placement.decode)
            if now < journey.lost.get((endpoint.instance_id, endpoint.epoch), -math.inf) + DOUBT_S
        ]
        if doubted:
            self._tell(journey, ReportPhase.CANCELLED, 0.0, now)
            journey.excluded |= frozenset(doubted)
            self._pause(journey, NoWorker.code, now)
            return False
        journey.phase, journey.placement, journey.placed_at = Phase.PREFILLING, placement, now
        if journey.attempt == 1:
            journey.predicted_ttft_s = placement.predicted_ttft_s
        return True

    def _pause(self, journey: Journey, reason: str, now: float) -> None:
        if journey.impatient_at is None:
            journey.impatient_at = now + PATIENCE_S
        if now >= journey.impatient_at:
            self.end(journey, End.FAILED, reason, now)

    def first_token(self, journey: Journey, prompt: Prompt, now: float, back_s: float = 0.0) -> None:
        """Takes the first token of a computed prompt, which reaches the client `back_s` later."""
        assert prompt.started_at is not None
        queue_s = max(prompt.started_at - prompt.submitted_at - prompt.load_s, 0.0)
        if journey.attempt == 1:
            journey.cached_tokens, journey.prefill_s = prompt.cached, prompt.compute_s
            journey.load_s, journey.queue_s = prompt.load_s, queue_s
        journey.impatient_at = None
        journey.take_token(now + back_s)
        report = Report(
            request_id=RequestId(journey.request_id),
            phase=ReportPhase.FIRST_TOKEN,
            elapsed_s=now + back_s - journey.placed_at,
            cached_tokens=prompt.cached,
            output_tokens=journey.num_generated,
            queue_s=queue_s,
            transfer_s=prompt.load_s,
            prefill_s=prompt.compute_s / self._stages_of(journey),
        )
        self._conductor.handle(report, now)
        if not journey.num_remaining:
            self.finish(journey, now, back_s)

    def _stages_of(self, journey: Journey) -> int:
        """Returns the number of machines that shared the prompt's computation."""
        placement = journey.placement
        assert placement is not None
        return 1 if placement.is_undivided else self._num_stages

    def finish(self, journey: Journey, now: float, back_s: float = 0.0) -> None:
        """Ends a request that has all its tokens. The last one reaches the client `back_s` later."""
        self._tell(journey, ReportPhase.FINISHED, now + back_s - journey.placed_at, now)
        self.end(journey, End.COMPLETED, "", now + back_s)

    def reject(self, journey: Journey, reason: str, now: float) -> None:
        """Ends a request that a machine refuses to continue."""
        self._tell(journey, ReportPhase.CANCELLED, now - journey.placed_at, now)
        self.end(journey, End.REJECTED, reason, now)

    def lose(self, journey: Journey, broken: Iterable[str], now: float) -> bool:
        """Ends the attempt. True = another one is to be placed; otherwise the request has failed."""
        assert journey.placement is not None
        self._tell(journey, ReportPhase.FAILED, now - journey.placed_at, now)
        if journey.attempt == MAX_ATTEMPTS:
            self.end(journey, End.FAILED, PeerLost.code, now)
            return False
        names = frozenset(broken)
        for endpoint in (journey.placement.prefill, journey.placement.decode):
            if endpoint.instance_id in names:
                journey.lost[endpoint.instance_id, endpoint.epoch] = now
        journey.excluded |= names
        journey.attempt += 1
        journey.phase = Phase.PLACING
        return True

    def end(self, journey: Journey, end: End, reason: str, now: float) -> None:
        journey.finish(end, reason, now)
        self.num_open -= 1

    def _tell(self, journey: Journey, phase: ReportPhase, elapsed_s: float, now: float) -> None:
        report = Report(
            request_id=RequestId(journey.request_id),
            phase=phase,
            elapsed_s=elapsed_s,
            output_tokens=journey.num_generated,
        )
        self._conductor.handle(report, now)


def arrivals(journeys: Sequence[Journey], overheads: Overheads) -> Iterator[Timed[ClusterEvent]]:
    """Yields the arrivals in trace order, which is the order of their times. A request that arrives alone takes
    `request_s` less `back_s`; for `gateway_s` of that the gateway works on it."""
    instants = [journey.record.arrived_s for journey in journeys]
    beside_s = max(overheads.request_s - overheads.back_s - overheads.gateway_s, 0.0)
    for journey, done_at in zip(journeys, by_turns(instants, overheads.gateway_s), strict=True):
        yield Timed(done_at + beside_s, Arrive(journey))


def by_turns(instants: Sequence[float], work_s: float) -> Iterator[float]:
    """Yields the completion times of jobs that arrive at `instants`, in order, on one worker shared evenly.

    All jobs take `work_s` seconds alone, so they complete in order of arrival.
    """
    if work_s <= 0:
        yield from instants
        return
    # Per job in progress: the service that a permanent job has received when this one completes.
    owed: deque[float] = deque()
    now = given_s = 0.0

    def next_done() -> float:
        return now + (owed[0] - given_s) * len(owed)

    for at in instants:
        while owed and (done_at := next_done()) <= at:
            now, given_s = done_at, owed.popleft()
            yield now
        if owed:
            given_s += (at - now) / len(owed)
        now = at
        owed.append(given_s + work_s)
    while owed:
        now, given_s = next_done(), owed.popleft()
        yield now
