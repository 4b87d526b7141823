"""Coupled machines step as a plain loop over steps says, share prefixes, and lose neither blocks nor requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ConfigError
from protocol.profile import DecodeProfile, PrefillProfile
from tests.thoroughness import examples
from tests.traces.simulator.small import BLOCK, MODEL, request, run_coupled
from traces.format import TraceRecord
from traces.simulator.results import End
from traces.simulator.run import simulate
from traces.simulator.spec import CoupledSpec, ModelProfile

EXACT = replace(
    MODEL,
    prefill=PrefillProfile(c0=Fraction(1, 13), c1=Fraction(1, 101), c2=Fraction(1, 100_003)),  # type: ignore[arg-type]
    decode=DecodeProfile(c0=Fraction(1, 19), c1=Fraction(1, 307), c2=Fraction(1, 50_021)),  # type: ignore[arg-type]
    max_num_seqs=3,
)


def spec(**changes: Any) -> CoupledSpec:
    return CoupledSpec(
        **{"model": MODEL, "num_instances": 1, "block_size": BLOCK, **changes}  # type: ignore[arg-type]
    )


@dataclass(eq=False)
class Seq:
    """One request of the reference."""

    number: int
    tokens: int
    missing: int
    remaining: int
    keys: tuple[Any, ...]
    token_at: list[Any] = field(default_factory=list)


class Reference:
    """One machine with memory for everything, one step after the other."""

    def __init__(self, spec: CoupledSpec, records: list[TraceRecord]) -> None:
        self.spec, self.model = spec, spec.model
        self.todo = sorted(enumerate(records), key=lambda item: item[1].arrived_s)
        self.waiting: list[Seq] = []
        self.running: list[Seq] = []
        self.known: set[Any] = set()
        self.all: dict[int, Seq] = {}

    def run(self) -> dict[int, list[Any]]:
        now: Any = 0
        while self.todo or self.waiting or self.running:
            self._arrive(now)
            while self.waiting and len(self.running) < self.model.max_num_seqs:
                self._admit(self.waiting.pop(0))
            if not self.running:
                now = self.todo[0][1].arrived_s
                continue
            now += self._step(now)
        return {number: seq.token_at for number, seq in self.all.items()}

    def _arrive(self, now: Any) -> None:
        while self.todo and self.todo[0][1].arrived_s <= now:
            number, record = self.todo.pop(0)
            keys = tuple(record.hash_ids[: record.input_length // BLOCK])
            n = record.input_length
            seq = Seq(number, n, n, max(record.output_length, 1), keys)
            self.all[number] = seq
            self.waiting.append(seq)

    def _admit(self, seq: Seq) -> None:
        usable = seq.keys[: (seq.tokens - 1) // BLOCK]
        cached = next((i for i, key in enumerate(usable) if key not in self.known), len(usable))
        seq.missing = seq.tokens - (cached * BLOCK if self.spec.prefix_caching else 0)
        self.running.append(seq)

    def _step(self, now: Any) -> Any:
        behind = [s for s in self.running if s.missing > 1]
        sampling = [s for s in self.running if s.missing == 1]
        seconds: Any = 0
        if behind and not self.spec.chunked_prefill:
            sampling = [behind[0]]
            seconds = self._compute(behind[0], behind[0].missing)
        else:
            if sampling:
                context = sum(s.tokens for s in sampling)
                seconds = self.model.decode.step_s(len(sampling), context)
            budget = self.spec.max_num_batched_tokens - len(sampling)
            for seq in behind:
                count = min(budget, seq.missing)
                if count > 0:
                    budget -= count
                    seconds += self._compute(seq, count)
                    if not seq.missing:
                        sampling.append(seq)
        for seq in sampling:
            if not seq.token_at:
                self.known |= set(seq.keys)
            seq.missing = 1
            seq.tokens += 1
            seq.remaining -= 1
            seq.token_at.append(now + seconds)
        self.running = [s for s in self.running if s.remaining]
        return seconds

    def _compute(self, seq: Seq, count: int) -> Any:
        start = seq.tokens - seq.missing
        seq.missing -= count
        return self.model.prefill.seconds(start + count, start)


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRecord]:
    """No two at once, since the first of them would begin without the other; and hardly ever at the end of a step."""
    records = []
    instants = draw(st.lists(st.integers(0, 6 * 997), min_size=1, max_size=10, unique=True))
    for number, instant in enumerate(instants):
        at = Fraction(instant, 997)
        prefix = draw(st.sampled_from([[], list(range(4)), list(range(9)), [0, 1, 50, 51]]))
        record = request(0.0, draw(st.integers(1, 110)), draw(st.integers(1, 25)), prefix, 100 * (number + 1))
        records.append(replace(record, arrived_s=at))
    return sorted(records, key=lambda record: record.arrived_s)


@settings(deadline=None, max_examples=examples(20))
@given(records=traces(), chunked=st.booleans(), caching=st.booleans(), budget=st.integers(4, 60))
def test_tokens_come_when_a_loop_over_all_steps_says_so(
    records: list[TraceRecord], chunked: bool, caching: bool, budget: int
) -> None:
    """In exact arithmetic: plain and chunked prefill, with and without prefix caching, slots and arrivals."""
    exact = spec(model=EXACT, chunked_prefill=chunked, prefix_caching=caching, max_num_batched_tokens=budget)
    expected = Reference(exact, records).run()
    for journey in run_coupled(exact, records):
        token_at = [journey.first_token_at]
        for gap in journey.gaps_s:
            token_at.append(token_at[-1] + gap)
        assert token_at == expected[journey.index]


def small(num_blocks: int) -> ModelProfile:
    return replace(MODEL, device_tokens=num_blocks * BLOCK, max_num_seqs=4)


@settings(deadline=None, max_examples=examples(15))
@given(
    records=traces(),
    chunked=st.booleans(),
    caching=st.booleans(),
    num_blocks=st.integers(14, 30),
    num_instances=st.integers(1, 3),
)
def test_with_little_memory_every_request_still_ends_once(
    records: list[TraceRecord], chunked: bool, caching: bool, num_blocks: int, num_instances: int
) -> None:
    """Preemption and eviction of shared prefixes, proofs after every event."""
    little = spec(
        model=small(num_blocks),
        chunked_prefill=chunked,
        prefix_caching=caching,
        max_num_batched_tokens=30,
        num_instances=num_instances,
    )
    for journey in run_coupled(little, records):
        assert journey.end is End.COMPLETED
        assert journey.num_generated == journey.num_outputs == len(journey.gaps_s) + 1


def test_requests_go_to_the_machine_with_the_fewest() -> None:
    records = [request(0.0, 100, 5, base=100 * number) for number in range(4)]
    outcomes = simulate(spec(num_instances=2), records).outcomes
    assert [each.prefill for each in outcomes] == ["instance-0", "instance-1"] * 2


def test_a_request_that_never_fits_fails_and_a_bad_spec_is_refused() -> None:
    (one,) = simulate(spec(model=small(10)), [request(0.0, 95, 10)]).outcomes
    assert (one.end, one.reason) == (End.FAILED, "too_long")
    with pytest.raises(ConfigError, match="coupled"):
        simulate(spec(num_instances=0), [request(0.0, 95, 10)])
