"""Tests of coupled machines: steps match a plain reference loop, prefixes are shared, and no request is lost."""

import itertools
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.step_time import DecodeProfile, PrefillProfile
from moonserve.traces.format import TraceRecord
from moonserve.traces.simulator.cluster.run import simulate
from moonserve.traces.simulator.results import End
from moonserve.traces.simulator.spec import CoupledSpec, ModelProfile
from tests.thoroughness import examples
from tests.traces.simulator.small import BLOCK, MODEL, request, run_checked

EXACT = replace(
    MODEL,
    prefill=PrefillProfile(c0=Fraction(1, 13), c1=Fraction(1, 101), c2=Fraction(1, 100_003)),  # type: ignore[arg-type]
    decode=DecodeProfile(c0=Fraction(1, 19), c1=Fraction(1, 307), c2=Fraction(1, 50_021)),  # type: ignore[arg-type]
    max_num_seqs=3,
)


def spec(**changes: Any) -> CoupledSpec:
    return CoupledSpec(**{"model": MODEL, "num_instances": 1, "block_size": BLOCK, **changes})


@dataclass(eq=False)
class Seq:
    """One request in the reference loop."""

    record: TraceRecord
    tokens: int
    num_uncomputed: int
    token_at: list[Any] = field(default_factory=list)

    def compute(self, count: int, profile: PrefillProfile) -> Any:
        start = self.tokens - self.num_uncomputed
        self.num_uncomputed -= count
        return profile.seconds(start + count, start)


def reference(spec: CoupledSpec, records: list[TraceRecord]) -> list[list[Any]]:
    """Returns the token times of each request, from a step-by-step loop over one machine with unlimited memory."""
    todo = [Seq(record, record.input_length, record.input_length) for record in records]
    everyone = list(todo)
    waiting: list[Seq] = []
    running: list[Seq] = []
    known: set[int] = set()
    now: Any = 0
    while todo or waiting or running:
        while todo and todo[0].record.arrived_s <= now:
            waiting.append(todo.pop(0))
        while waiting and len(running) < spec.model.max_num_seqs:
            seq = waiting.pop(0)
            if spec.prefix_caching:
                usable = seq.record.hash_ids[: (seq.tokens - 1) // BLOCK]
                seq.num_uncomputed -= BLOCK * sum(1 for _ in itertools.takewhile(known.__contains__, usable))
            running.append(seq)
        if not running:
            now = todo[0].record.arrived_s
            continue
        seconds, sampling = step(spec, running)
        now += seconds
        for seq in sampling:
            if not seq.token_at:
                known.update(seq.record.hash_ids[: seq.record.input_length // BLOCK])
            seq.num_uncomputed = 1
            seq.tokens += 1
            seq.token_at.append(now)
        running = [seq for seq in running if len(seq.token_at) < seq.record.output_length]
    return [seq.token_at for seq in everyone]


def step(spec: CoupledSpec, running: list[Seq]) -> tuple[Any, list[Seq]]:
    """Returns the duration of the next step and the sequences that get a token at its end."""
    behind = [seq for seq in running if seq.num_uncomputed > 1]
    sampling = [seq for seq in running if seq.num_uncomputed == 1]
    prefill = spec.model.prefill
    if behind and not spec.chunked_prefill:
        return behind[0].compute(behind[0].num_uncomputed, prefill), behind[:1]
    seconds: Any = 0
    if sampling:
        seconds = spec.model.decode.step_s(len(sampling), sum(seq.tokens for seq in sampling))
    budget = spec.max_num_batched_tokens - len(sampling)
    for seq in behind:
        count = min(budget, seq.num_uncomputed)
        if count > 0:
            budget -= count
            seconds += seq.compute(count, prefill)
            sampling += [] if seq.num_uncomputed else [seq]
    return seconds, sampling


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRecord]:
    """Draws traces with distinct arrival times, since the first of two at once would start alone; few end a step."""
    records = []
    instants = draw(st.lists(st.integers(0, 6 * 997), min_size=1, max_size=10, unique=True))
    for number, instant in enumerate(sorted(instants)):
        at: Any = Fraction(instant, 997)
        prefix = draw(st.sampled_from([[], list(range(4)), list(range(9)), [0, 1, 50, 51]]))
        records.append(request(at, draw(st.integers(1, 110)), draw(st.integers(1, 25)), prefix, 100 * (number + 1)))
    return records


def specs(**others: st.SearchStrategy[Any]) -> st.SearchStrategy[CoupledSpec]:
    return st.builds(spec, chunked_prefill=st.booleans(), prefix_caching=st.booleans(), **others)


@settings(deadline=None, max_examples=examples(20))
@given(records=traces(), exact=specs(model=st.just(EXACT), max_num_batched_tokens=st.integers(4, 60)))
def test_token_times_equal_those_of_a_simple_loop(records: list[TraceRecord], exact: CoupledSpec) -> None:
    """All token times equal the reference's in exact arithmetic, with and without chunks and prefix caching."""
    _, states = run_checked(exact, records)
    found = [list(itertools.accumulate([each.first_token_at, *each.gaps_s])) for each in states]
    assert found == reference(exact, records)


def small(num_blocks: int) -> ModelProfile:
    return replace(MODEL, device_tokens=num_blocks * BLOCK, max_num_seqs=4)


@settings(deadline=None, max_examples=examples(15))
@given(
    records=traces(),
    little=specs(
        model=st.integers(14, 30).map(small), max_num_batched_tokens=st.just(30), num_instances=st.integers(1, 3)
    ),
)
def test_with_little_memory_every_request_still_ends_once(records: list[TraceRecord], little: CoupledSpec) -> None:
    """Despite preemption and eviction of shared prefixes, each request completes; validated after every event."""
    for state in run_checked(little, records)[1]:
        assert state.end is End.COMPLETED
        assert state.num_generated == state.num_outputs == len(state.gaps_s) + 1


def test_requests_go_to_the_machine_with_the_fewest() -> None:
    records = [request(0.0, 100, 5, base=100 * number) for number in range(4)]
    outcomes = simulate(spec(num_instances=2), records).outcomes
    assert [each.prefill for each in outcomes] == ["instance-0", "instance-1"] * 2


def test_a_request_that_never_fits_fails_and_a_bad_spec_is_refused() -> None:
    (one,) = simulate(spec(model=small(10)), [request(0.0, 95, 10)]).outcomes
    assert (one.end, one.reason) == (End.FAILED, "too_long")
    with pytest.raises(ConfigError, match="coupled"):
        simulate(spec(num_instances=0), [request(0.0, 95, 10)])
