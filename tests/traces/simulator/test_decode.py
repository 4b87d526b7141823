"""The closed form of a decode machine is what the live worker's state machine does step by step."""

from __future__ import annotations

import heapq
import itertools
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import InvalidRequest
from protocol.profile import DecodeProfile, PrefillProfile
from tests.thoroughness import examples
from tests.traces.simulator.live_decode import LiveDecode, Prompt
from traces.simulator.decode import DecodeMachine, Granted
from traces.simulator.sequence import Finished
from traces.simulator.spec import ModelProfile

BLOCK = 4


def fractions(least: int, most: int) -> st.SearchStrategy[Fraction]:
    """Numbers that neither round nor often coincide."""
    return st.integers(least * 997, most * 997).map(lambda n: Fraction(n, 997))


def model(num_blocks: int, max_num_seqs: int, decode: DecodeProfile) -> ModelProfile:
    return ModelProfile(
        name="test",
        prefill=PrefillProfile(c0=0, c1=Fraction(1, 7), c2=Fraction(1, 101)),  # type: ignore[arg-type]
        decode=decode,
        kv_bytes_per_token=8,
        num_layers=1,
        nic_bytes_per_s=1e9,
        device_bytes_per_s=1e9,
        disk_bytes_per_s=1e9,
        device_tokens=num_blocks * BLOCK,
        dram_tokens=1000,
        max_num_seqs=max_num_seqs,
    )


PROFILES = st.builds(
    DecodeProfile,
    c0=fractions(1, 3),
    c1=fractions(0, 1),
    c2=st.one_of(st.just(Fraction(0)), fractions(0, 1).map(lambda c: c / 50)),
)
PROMPTS = st.builds(
    Prompt,
    at=fractions(0, 60),
    carried_s=fractions(0, 20),
    num_tokens=st.integers(1, 24),
    num_outputs=st.integers(1, 20),
    cancelled_after_s=st.one_of(st.none(), st.none(), fractions(1, 60)),
)


def simulate(profile: ModelProfile, chunk: int, prompts: list[Prompt]) -> dict[str, list[Any]]:
    """Token instants of each request that was granted, beginning with the grant."""
    machine = DecodeMachine(profile, BLOCK, chunk)
    heap: list[tuple[Any, int, int, str]] = []
    order = itertools.count()  # of events of one instant, as the live driver has it
    token_at: dict[str, list[Any]] = {}
    by_name = {f"r{number}": prompt for number, prompt in enumerate(prompts)}
    for name, prompt in by_name.items():
        heapq.heappush(heap, (prompt.at, next(order), 0, name))
        if prompt.cancelled_after_s is not None:
            heapq.heappush(heap, (prompt.at + prompt.cancelled_after_s, next(order), 2, name))
    cancelled: set[str] = set()
    while heap or machine.wake_at is not None:
        if heap and (machine.wake_at is None or heap[0][0] < machine.wake_at):
            now, _, kind, name = heapq.heappop(heap)
        else:
            now, kind, name = machine.wake_at, 3, ""
        prompt = by_name.get(name)
        if kind == 3:
            outcomes = machine.advance(now)
        elif name in cancelled:
            continue
        elif kind == 0:
            outcomes = machine.reserve(name, prompt.num_tokens, now)
        elif kind == 1:
            granted_at = token_at[name][0]
            outcomes = machine.land(name, prompt.num_tokens, prompt.num_outputs, granted_at, now)
        else:
            cancelled.add(name)
            outcomes = machine.cancel(name, now)
        for outcome in outcomes:
            if isinstance(outcome, Granted):
                token_at[outcome.request_id] = [now]
                carried_s = by_name[outcome.request_id].carried_s
                heapq.heappush(heap, (now + carried_s, next(order), 1, outcome.request_id))
            elif isinstance(outcome, Finished):
                instants = token_at[outcome.sequence.request_id]
                for gap in outcome.gaps_s:
                    instants.append(instants[-1] + gap)
                assert instants[-1] == outcome.at
        machine.validate()
    assert machine.free_blocks == machine.num_blocks
    return token_at


@settings(max_examples=examples(75), deadline=None)
@given(
    profile=PROFILES,
    num_blocks=st.integers(8, 40),
    max_num_seqs=st.integers(1, 6),
    chunk=st.integers(8, 20),
    prompts=st.lists(PROMPTS, min_size=1, max_size=12),
)
def test_every_token_comes_when_the_live_worker_would_send_it(
    profile: DecodeProfile, num_blocks: int, max_num_seqs: int, chunk: int, prompts: list[Prompt]
) -> None:
    """Joins, ends, slots, growth, preemption, recomputation and cancellation, in exact arithmetic: all instants are
    equal for requests that finish."""
    machine = model(num_blocks, max_num_seqs, profile)
    fitting = [p for p in prompts if -(-(p.num_tokens + 1) // BLOCK) <= num_blocks]
    fitting = [p for p in fitting if p.num_tokens + p.num_outputs <= num_blocks * BLOCK]
    live = LiveDecode(machine, BLOCK, chunk).run(fitting)
    simulated = simulate(machine, chunk, fitting)
    assert set(simulated) == set(live)
    for name, instants in live.items():
        if fitting[int(name[1:])].cancelled_after_s is None:
            assert simulated[name] == instants


def test_a_prompt_that_never_fits_is_refused() -> None:
    machine = DecodeMachine(model(2, 4, DecodeProfile(c0=1, c1=0, c2=0)), BLOCK, 16)
    with pytest.raises(InvalidRequest):
        machine.reserve("r", 2 * BLOCK, 0.0)


def test_blocks_of_a_cancelled_landing_are_for_the_preempted_one_from_the_next_step_on() -> None:
    """The longest prompt's decoding preempts the last one; four blocks come free when a landing is given up."""

    def prompt(num_tokens: int, num_outputs: int, **rest: Any) -> Prompt:
        fields = {"at": Fraction(0), "carried_s": Fraction(0), **rest}
        return Prompt(num_tokens=num_tokens, num_outputs=num_outputs, **fields)

    prompts = [
        *(prompt(1, 1) for _ in range(6)),
        prompt(9, 6),
        prompt(22, 5),
        prompt(13, 1, carried_s=Fraction(7), cancelled_after_s=Fraction(12195, 997)),
        prompt(7, 2),
    ]
    machine = model(17, 6, DecodeProfile(c0=Fraction(1), c1=Fraction(515, 997), c2=Fraction(0)))  # type: ignore[arg-type]
    live = LiveDecode(machine, BLOCK, 8).run(prompts)
    simulated = simulate(machine, 8, prompts)
    assert simulated["r9"] == live["r9"]
    assert simulated["r7"] == live["r7"]
