"""The gateway's part of a request, like `gateway.generation.request_state`: place, place again after a loss, report,
end.

It queries the conductor and updates the requests. The effects of a placement on machines are left to `cluster`. A
rejection ends a request: `retry_after` is not followed. As in the live gateway, there are three attempts, instances
that failed are avoided, a lost incarnation that the conductor still offers is returned, and failed placements after a
loss are retried every `RETRY_PAUSE_S` for `RETRY_FOR_S`. The gateway divides its time evenly among all new requests, so
that simultaneous ones are all late, including the first. The other overheads of a request pass in parallel.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence

from moonserve.conductor.events import Place, Placed, Refused, Rejected, Report
from moonserve.conductor.state import ConductorState
from moonserve.protocol.errors import NoWorker, PeerLost
from moonserve.protocol.request import RequestId
from moonserve.protocol.request import RequestPhase as ReportPhase
from moonserve.traces.simulator.cluster.event_loop import Arrive, TimedEvent
from moonserve.traces.simulator.cluster.event_loop import Event as ClusterEvent
from moonserve.traces.simulator.cluster.request_state import Phase, RequestState
from moonserve.traces.simulator.prefill import Prompt
from moonserve.traces.simulator.results import End
from moonserve.traces.simulator.spec import LATE, ClusterSpec, Overheads

MAX_ATTEMPTS = 3  # as in `gateway.generation.request_state`, which does not count attempts that made progress
RETRY_FOR_S = 20.0
RETRY_PAUSE_S = 0.25
AVOID_LOST_S = 6.0

NO_SLO_S = 1e9


class Gateway:
    """Places and ends all requests of a trace."""

    def __init__(self, conductor: ConductorState, spec: ClusterSpec) -> None:
        self._conductor = conductor
        self._tbt_slo_s = NO_SLO_S if spec.admission == LATE else None
        self._max_model_len = spec.model.max_model_len
        self._num_stages = spec.prefill_group
        self.num_open = 0  # requests that have not ended

    def place(self, request: RequestState, now: float) -> bool:
        """Requests a placement. True = placed; otherwise the request has ended or is placed again after
        RETRY_PAUSE_S."""
        place = Place(
            request_id=RequestId(request.request_id),
            block_keys=request.keys,
            num_prompt_tokens=request.num_tokens,
            max_tokens=self._max_model_len - request.num_tokens,  # the length of the answer is unknown
            tbt_slo_s=self._tbt_slo_s,
            excluded_instances=request.excluded,
            tenant=request.record.tenant,
            priority=request.record.priority,
        )
        reply = self._conductor.handle(place, now)[-1]
        if isinstance(reply, Placed):
            return self._placed(request, reply, now)
        assert isinstance(reply, Rejected | Refused)
        may_recover = isinstance(reply, Rejected) or isinstance(reply.error, NoWorker)
        reason = reply.reason if isinstance(reply, Rejected) else reply.error.code
        if request.attempt > 1 and may_recover:
            if not isinstance(reply, Rejected):  # no other instance: only recently lost ones stay excluded
                request.excluded = frozenset(name for (name, _), at in request.lost.items() if now < at + AVOID_LOST_S)
            self._pause(request, reason, now)
        elif isinstance(reply, Rejected):
            request.predicted_ttft_s = reply.predicted_ttft_s
            self.end(request, End.REJECTED, reason, now)
        else:
            self.end(request, End.FAILED, reason, now)
        return False

    def _placed(self, request: RequestState, reply: Placed, now: float) -> bool:
        placement = reply.placement
        doubted = [
            endpoint.instance_id
            for endpoint in (placement.prefill, placement.decode)
            if now < request.lost.get((endpoint.instance_id, endpoint.epoch), -math.inf) + AVOID_LOST_S
        ]
        if doubted:
            self._report(request, ReportPhase.CANCELLED, 0.0, now)
            request.excluded |= frozenset(doubted)
            self._pause(request, NoWorker.code, now)
            return False
        request.phase, request.placement, request.placed_at = Phase.PREFILLING, placement, now
        if request.attempt == 1:
            request.predicted_ttft_s = placement.predicted_ttft_s
        return True

    def _pause(self, request: RequestState, reason: str, now: float) -> None:
        if request.retry_deadline is None:
            request.retry_deadline = now + RETRY_FOR_S
        if now >= request.retry_deadline:
            self.end(request, End.FAILED, reason, now)

    def first_token(self, request: RequestState, prompt: Prompt, now: float, back_s: float = 0.0) -> None:
        """Takes the first token of a computed prompt, which reaches the client `back_s` later."""
        assert prompt.started_at is not None
        queue_s = max(prompt.started_at - prompt.submitted_at - prompt.load_s, 0.0)
        if request.attempt == 1:
            request.cached_tokens, request.prefill_s = prompt.cached, prompt.compute_s
            request.load_s, request.queue_s = prompt.load_s, queue_s
        request.retry_deadline = None
        request.take_token(now + back_s)
        num_stages = 1 if request.placed.is_local_prefill else self._num_stages  # machines that shared the computation
        report = Report(
            request_id=RequestId(request.request_id),
            phase=ReportPhase.FIRST_TOKEN,
            elapsed_s=now + back_s - request.placed_at,
            cached_tokens=prompt.cached,
            output_tokens=request.num_generated,
            queue_s=queue_s,
            transfer_s=prompt.load_s,
            prefill_s=prompt.compute_s / num_stages,
        )
        self._conductor.handle(report, now)
        if not request.num_remaining:
            self.finish(request, now, back_s)

    def finish(self, request: RequestState, now: float, back_s: float = 0.0) -> None:
        """Ends a request that has all its tokens. The last one reaches the client `back_s` later."""
        self._report(request, ReportPhase.FINISHED, now + back_s - request.placed_at, now)
        self.end(request, End.COMPLETED, "", now + back_s)

    def reject(self, request: RequestState, reason: str, now: float) -> None:
        """Ends a request that a machine refuses to continue."""
        self._report(request, ReportPhase.CANCELLED, now - request.placed_at, now)
        self.end(request, End.REJECTED, reason, now)

    def end_attempt(self, request: RequestState, broken: str, now: float) -> bool:
        """Ends the attempt. True = another one is to be placed; otherwise the request has failed."""
        self._report(request, ReportPhase.FAILED, now - request.placed_at, now)
        if request.attempt == MAX_ATTEMPTS:
            self.end(request, End.FAILED, PeerLost.code, now)
            return False
        for endpoint in (request.placed.prefill, request.placed.decode):
            if endpoint.instance_id == broken:
                request.lost[endpoint.instance_id, endpoint.epoch] = now
        request.excluded |= {broken}
        request.attempt += 1
        request.phase = Phase.PLACING
        return True

    def end(self, request: RequestState, end: End, reason: str, now: float) -> None:
        request.finish(end, reason, now)
        self.num_open -= 1

    def _report(self, request: RequestState, phase: ReportPhase, elapsed_s: float, now: float) -> None:
        report = Report(
            request_id=RequestId(request.request_id),
            phase=phase,
            elapsed_s=elapsed_s,
            output_tokens=request.num_generated,
        )
        self._conductor.handle(report, now)


def arrivals(requests: Sequence[RequestState], overheads: Overheads) -> Iterator[TimedEvent[ClusterEvent]]:
    """Yields the arrivals in trace order, which is the order of their times. A request that arrives alone takes
    `request_s` less `back_s`; for `gateway_s` of that the gateway works on it."""
    instants = [request.record.arrived_s for request in requests]
    beside_s = max(overheads.request_s - overheads.back_s - overheads.gateway_s, 0.0)
    for request, done_at in zip(requests, processor_sharing(instants, overheads.gateway_s), strict=True):
        yield TimedEvent(done_at + beside_s, Arrive(request))


def processor_sharing(instants: Sequence[float], work_s: float) -> Iterator[float]:
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
