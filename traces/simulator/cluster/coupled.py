"""Baselines: machines that prefill and decode in one batch, as vLLM does. Pure, apart from the requests they update.

Plain: a waiting prompt is computed whole while decoding pauses. With chunked prefill, each step has the decoding
sequences and as much of the oldest prompt as the token budget allows. With prefix caching, a machine reuses blocks that
are still in its own device memory. Requests go to the machine with the fewest unfinished ones; none is rejected. A step
with a chunk takes as long as the decode step and the chunk in sequence. Several waiting prompts are computed in
sequence, where vLLM batches them: the last one's first token comes at the same time, the others' come sooner.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moonserve.traces.simulator.batch import Batch
from moonserve.traces.simulator.cluster.event_loop import Arrive, Event, SampleDue, TimedEvent, WakeUp, WakeUps
from moonserve.traces.simulator.cluster.heartbeats_and_samples import SampleSeries, sample_of
from moonserve.traces.simulator.cluster.nodes import Node
from moonserve.traces.simulator.cluster.request_state import Phase, RequestState
from moonserve.traces.simulator.results import End
from moonserve.traces.simulator.sequence import BlockPool, FirstToken, PrefixCachingBlockPool, SequenceState
from moonserve.traces.simulator.spec import CoupledSpec

_SAMPLE_INTERVAL_S = 30.0


@dataclass(slots=True, eq=False, kw_only=True)
class CoupledNode(Node):
    """A machine of the baseline."""

    machine: Batch
    blocks: BlockPool
    num_unfinished: int = 0
    num_chosen: int = 0  # arrival number of the latest request placed here


class CoupledCluster:
    """A cluster of coupled machines. Pass `handle` to a clock, then read the requests."""

    def __init__(self, spec: CoupledSpec, requests: Sequence[RequestState]) -> None:
        """Raises ConfigError for an invalid spec."""
        spec.check()
        self.spec = spec
        self.requests = requests
        self.machines = [self._machine(index) for index in range(spec.num_instances)]
        self.samples, self._wakes = SampleSeries((), 0), WakeUps()
        self._request_of: dict[str, RequestState] = {}
        self._num_open = len(requests)
        self._num_arrived = 0

    def _machine(self, index: int) -> CoupledNode:
        spec, model = self.spec, self.spec.model
        total = model.device_tokens // spec.block_size
        blocks = PrefixCachingBlockPool(total, spec.block_size) if spec.prefix_caching else None
        kept = blocks or BlockPool(total)
        batch = Batch(
            decode=model.decode,
            prefill=model.prefill,
            blocks=kept,
            block_size=spec.block_size,
            max_num_seqs=model.max_num_seqs,
            max_batched_tokens=max(spec.max_num_batched_tokens, model.max_num_seqs + 1),
            prompts_first=not spec.chunked_prefill,
        )
        return CoupledNode(name=f"instance-{index}", machine=batch, blocks=kept)

    def begin(self) -> Iterator[TimedEvent[Event]]:
        for request in self.requests:
            yield TimedEvent(request.record.arrived_s, Arrive(request))
        yield TimedEvent(0.0, SampleDue())

    def handle(self, event: Event, now: float) -> list[TimedEvent[Event]]:
        match event:
            case Arrive(request):
                self._arrive(request, now)
            case WakeUp(node):
                self._wakes.woken(node, now)
                self._advance(node, now)
            case SampleDue():
                self.samples.instances += (sample_of(machine, now) for machine in self.machines)
                return [TimedEvent(now + _SAMPLE_INTERVAL_S, SampleDue())] if self._num_open else []
        touched = self._wakes.take_touched()
        return [each for node in touched for each in self._wakes.next(node, node.machine.wake_at, now)]

    def _arrive(self, request: RequestState, now: float) -> None:
        tokens = request.num_tokens + request.num_outputs
        if -(-tokens // self.spec.block_size) > self.machines[0].blocks.total:
            self._end(request, End.FAILED, "too_long", now)
            return
        machine = min(self.machines, key=lambda m: (m.num_unfinished, m.num_chosen))
        self._num_arrived += 1
        machine.num_unfinished += 1
        machine.num_chosen = self._num_arrived
        self._advance(machine, now)
        self._request_of[request.request_id] = request
        request.phase = Phase.DECODING
        machine.machine.add(
            SequenceState(
                request_id=request.request_id,
                rank=(0, self._num_arrived),
                tokens=request.num_tokens,
                remaining=request.num_outputs,
                num_uncomputed=request.num_tokens,
                keys=request.keys,
            ),
            now,
        )

    def _advance(self, machine: Node | None, now: float) -> None:
        assert isinstance(machine, CoupledNode)
        self._wakes.touch(machine)
        for outcome in machine.machine.advance(now):
            sequence = outcome.sequence
            request = self._request_of[sequence.request_id]
            if isinstance(outcome, FirstToken):
                assert sequence.begun_at is not None
                request.take_token(outcome.at)
                request.cached_tokens = sequence.cached_tokens
                request.queue_s = sequence.begun_at - request.record.arrived_s
                request.prefill_s = sequence.prefill_s
                request.served_by = machine.name
            else:
                machine.num_unfinished -= 1
                request.take_tokens(outcome.gaps_s, outcome.at)
                self._end(request, End.COMPLETED, "", outcome.at)

    def _end(self, request: RequestState, end: End, reason: str, now: float) -> None:
        request.finish(end, reason, now)
        self._num_open -= 1
        self._request_of.pop(request.request_id, None)

    @property
    def counters(self) -> dict[str, float]:
        """Counters for the result."""
        return {
            "preemptions": sum(machine.machine.num_preemptions for machine in self.machines),
            "device_s": sum(request.prefill_s for request in self.requests),
        }

    def validate(self) -> None:
        """Raises AssertionError if the invariants of any machine are violated."""
        for machine in self.machines:
            machine.machine.validate()
            sequences = [*machine.machine.running, *machine.machine.waiting]
            assert machine.num_unfinished == len(sequences), "a request is lost"
            if isinstance(machine.blocks, PrefixCachingBlockPool):
                machine.blocks.validate(sequences)
