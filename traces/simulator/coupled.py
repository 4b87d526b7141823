"""Baselines: machines that prefill and decode in one batch, as vLLM does. Pure, apart from the journeys they update.

Plain: a waiting prompt is computed whole while decoding pauses. With chunked prefill, each step has the decoding
sequences and as much of the oldest prompt as the token budget allows. With prefix caching, a machine reuses blocks that
are still in its own device memory. Requests go to the machine with the fewest unfinished ones; none is rejected. A step
with a chunk takes as long as the decode step and the chunk in sequence. Several waiting prompts are computed in
sequence, where vLLM batches them: the last one's first token comes at the same time, the others' come sooner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from traces.simulator.batch import Batch
from traces.simulator.clock import Timed
from traces.simulator.events import Arrive, Event, Sample, Wake, Wakes
from traces.simulator.journey import Journey, Phase
from traces.simulator.machines import Node
from traces.simulator.results import End
from traces.simulator.sampling import Samples, sample_of
from traces.simulator.sequence import CachedBlocks, CountedBlocks, Sampled
from traces.simulator.sequence import Sequence as Running
from traces.simulator.spec import CoupledSpec

_SAMPLE_INTERVAL_S = 30.0


@dataclass(slots=True, eq=False, kw_only=True)
class Machine(Node):
    """A machine of the baseline."""

    machine: Batch
    blocks: CountedBlocks
    num_unfinished: int = 0
    num_chosen: int = 0  # arrival number of the latest request placed here


class CoupledCluster:
    """A cluster of coupled machines. Pass `handle` to a clock, then read the journeys."""

    def __init__(self, spec: CoupledSpec, journeys: Sequence[Journey]) -> None:
        """Raises ConfigError for an invalid spec."""
        spec.check()
        self.spec = spec
        self.journeys = journeys
        self.machines = [self._machine(index) for index in range(spec.num_instances)]
        self.samples, self._wakes = Samples((), 0), Wakes()
        self._journey_of: dict[str, Journey] = {}
        self._num_open = len(journeys)
        self._num_arrived = 0

    def _machine(self, index: int) -> Machine:
        spec, model = self.spec, self.spec.model
        total = model.device_tokens // spec.block_size
        blocks = CachedBlocks(total, spec.block_size) if spec.prefix_caching else None
        kept = blocks or CountedBlocks(total)
        batch = Batch(
            decode=model.decode,
            prefill=model.prefill,
            blocks=kept,
            block_size=spec.block_size,
            max_num_seqs=model.max_num_seqs,
            max_batched_tokens=max(spec.max_num_batched_tokens, model.max_num_seqs + 1),
            prompts_first=not spec.chunked_prefill,
        )
        return Machine(name=f"instance-{index}", machine=batch, blocks=kept)

    def begin(self) -> Iterator[Timed[Event]]:
        for journey in self.journeys:
            yield Timed(journey.record.arrived_s, Arrive(journey))
        yield Timed(0.0, Sample())

    def handle(self, event: Event, now: float) -> list[Timed[Event]]:
        match event:
            case Arrive(journey):
                self._arrive(journey, now)
            case Wake(node):
                self._wakes.woken(node, now)
                self._advance(node, now)
            case Sample():
                self.samples.instances += (sample_of(machine, now) for machine in self.machines)
                return [Timed(now + _SAMPLE_INTERVAL_S, Sample())] if self._num_open else []
        return [each for node in self._wakes.take_touched() for each in self._wakes.of_machine(node, now)]

    def _arrive(self, journey: Journey, now: float) -> None:
        tokens = journey.num_tokens + journey.num_outputs
        if -(-tokens // self.spec.block_size) > self.machines[0].blocks.total:
            self._end(journey, End.FAILED, "too_long", now)
            return
        machine = min(self.machines, key=lambda m: (m.num_unfinished, m.num_chosen))
        self._num_arrived += 1
        machine.num_unfinished += 1
        machine.num_chosen = self._num_arrived
        self._advance(machine, now)
        self._journey_of[journey.request_id] = journey
        journey.phase = Phase.DECODING
        machine.machine.add(
            Running(
                request_id=journey.request_id,
                rank=(0, self._num_arrived),
                tokens=journey.num_tokens,
                remaining=journey.num_outputs,
                missing=journey.num_tokens,
                keys=journey.keys,
            ),
            now,
        )

    def _advance(self, machine: Node | None, now: float) -> None:
        assert isinstance(machine, Machine)
        self._wakes.touch(machine)
        for outcome in machine.machine.advance(now):
            sequence = outcome.sequence
            journey = self._journey_of[sequence.request_id]
            if isinstance(outcome, Sampled):
                assert sequence.begun_at is not None
                journey.take_token(outcome.at)
                journey.cached_tokens = sequence.cached_tokens
                journey.queue_s = sequence.begun_at - journey.record.arrived_s
                journey.prefill_s = sequence.prefill_s
                journey.served_by = machine.name
            else:
                machine.num_unfinished -= 1
                journey.take_decoded(outcome.gaps_s, outcome.at)
                self._end(journey, End.COMPLETED, "", outcome.at)

    def _end(self, journey: Journey, end: End, reason: str, now: float) -> None:
        journey.finish(end, reason, now)
        self._num_open -= 1
        self._journey_of.pop(journey.request_id, None)

    @property
    def counters(self) -> dict[str, float]:
        """Counters for the result."""
        return {
            "preemptions": sum(machine.machine.num_preemptions for machine in self.machines),
            "device_s": sum(journey.prefill_s for journey in self.journeys),
        }

    def validate(self) -> None:
        """Raises AssertionError if the invariants of any machine are violated."""
        for machine in self.machines:
            machine.machine.validate()
            sequences = [*machine.machine.running, *machine.machine.waiting]
            assert machine.num_unfinished == len(sequences), "a request is lost"
            if isinstance(machine.blocks, CachedBlocks):
                machine.blocks.validate(sequences)
