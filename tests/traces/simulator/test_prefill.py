"""Prefill machines: order, preparation beside computing, chunks, pipelines of several machines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.profile import PrefillProfile
from traces.simulator.prefill import (
    PREPARED_AHEAD,
    ChunkBegun,
    Computed,
    PrefillMachine,
    PrefillOutcome,
    Prepare,
    Prompt,
)

PROFILE = PrefillProfile(c0=0.0, c1=1.0, c2=0.0)  # one second per token


def prompt(name: str, num_tokens: int, order: int = 0, at: float = 0.0) -> Prompt:
    return Prompt(request_id=name, rank=(0, order), num_tokens=num_tokens, submitted_at=at)


def prepared(machine: PrefillMachine, name: str, now: float, cached: int = 0) -> list[PrefillOutcome]:
    return [
        *machine.landing_granted(name, now),
        *machine.prefix_loaded(name, cached, now),
    ]


def test_a_prompt_is_computed_in_chunks_from_where_its_prefix_ends() -> None:
    """10 tokens, 2 of them cached, chunks of 5: [2, 7) until 5 s, [7, 10) until 8 s."""
    machine = PrefillMachine(PROFILE, chunk_tokens=5)
    (prepare,) = machine.submit(prompt("a", 10), 0.0)
    assert isinstance(prepare, Prepare)
    (first,) = prepared(machine, "a", 0.0, cached=2)
    assert isinstance(first, ChunkBegun)
    assert (first.first, first.end, first.ends_at) == (2, 7, 5.0)
    assert machine.wake_at == 5.0
    (second,) = machine.advance(5.0)
    assert isinstance(second, ChunkBegun)
    assert (second.first, second.end, second.ends_at) == (7, 10, 8.0)
    (done,) = machine.advance(8.0)
    assert isinstance(done, Computed)
    assert (done.prompt.compute_s, done.prompt.load_s) == (8.0, 0.0)
    assert machine.wake_at is None
    machine.validate()


def test_a_prefix_that_takes_longer_delays_its_prompt_by_the_rest() -> None:
    """`a` computes until 10 s; `b`'s prefix is there at 13 s: 3 s of load, nothing else is lost."""
    machine = PrefillMachine(PROFILE, chunk_tokens=100)
    machine.submit(prompt("a", 10, 1), 0.0)
    prepared(machine, "a", 0.0)
    machine.submit(prompt("b", 10, 2, at=1.0), 1.0)
    machine.landing_granted("b", 1.0)
    machine.advance(10.0)
    (chunk,) = machine.prefix_loaded("b", 4, 13.0)
    assert isinstance(chunk, ChunkBegun)
    assert chunk.prompt.load_s == 3.0
    assert chunk.ends_at == 19.0


def test_a_later_prompt_that_is_ready_does_not_wait_for_an_earlier_one_that_loads() -> None:
    machine = PrefillMachine(PROFILE, chunk_tokens=100)
    machine.submit(prompt("a", 10, 1), 0.0)
    machine.submit(prompt("b", 5, 2), 0.0)
    (chunk,) = prepared(machine, "b", 0.0)
    assert isinstance(chunk, ChunkBegun)
    assert chunk.prompt.request_id == "b"
    assert prepared(machine, "a", 1.0) == []
    outcomes = machine.advance(5.0)
    assert [type(outcome) for outcome in outcomes] == [Computed, ChunkBegun]


def test_a_few_prompts_are_prepared_ahead_and_one_that_overtakes_them_too() -> None:
    machine = PrefillMachine(PROFILE, chunk_tokens=100)
    waiting = (prompt(f"p{number}", 10, order=10 + number) for number in range(PREPARED_AHEAD + 3))
    assert sum(len(machine.submit(each, 0.0)) for each in waiting) == PREPARED_AHEAD
    (prepare,) = machine.submit(prompt("short", 1, order=1), 0.0)
    assert isinstance(prepare, Prepare)
    assert prepare.prompt.request_id == "short"
    machine.validate()


def test_a_prompt_of_lower_rank_goes_between_the_chunks_of_one_that_runs() -> None:
    """Long: 10 tokens in chunks of 5. Short: 2, submitted at 1 s, from 5 s to 7 s."""
    machine = PrefillMachine(PROFILE, chunk_tokens=5)
    machine.submit(prompt("long", 10, order=2), 0.0)
    prepared(machine, "long", 0.0)
    machine.submit(prompt("short", 2, order=1), 1.0)
    assert prepared(machine, "short", 1.0) == []
    ends = {}
    while (at := machine.wake_at) is not None:
        for outcome in machine.advance(at):
            if isinstance(outcome, Computed):
                ends[outcome.prompt.request_id] = at
        machine.validate()
    assert ends == {"short": 7.0, "long": 12.0}


def test_a_cancelled_prompt_is_never_computed() -> None:
    machine = PrefillMachine(PROFILE, chunk_tokens=5)
    machine.submit(prompt("a", 10, 1), 0.0)
    machine.submit(prompt("b", 10, 2), 0.0)
    prepared(machine, "a", 0.0)
    assert machine.cancel("a", 1.0) == []
    assert machine.cancel("a", 1.0) == []
    assert machine.advance(5.0) == []
    (chunk,) = prepared(machine, "b", 6.0)
    assert isinstance(chunk, ChunkBegun)
    machine.validate()


@settings(deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.floats(0, 50), st.integers(1, 30), st.floats(0, 20), st.integers(0, 29)),
        min_size=1,
        max_size=15,
    ),
    chunk=st.integers(1, 12),
    num_stages=st.integers(1, 4),
)
def test_every_prompt_is_computed_once_and_its_time_adds_up(
    jobs: list[tuple[float, int, float, int]], chunk: int, num_stages: int
) -> None:
    """Arrivals, loads and pipelines in any order: queue + load + pipeline = end − submission, work is conserved."""
    machine = PrefillMachine(PROFILE, chunk_tokens=chunk, num_stages=num_stages)
    todo: list[tuple[float, int, str, int]] = []  # (when, what, whose, number)
    for number, (at, _, _, _) in enumerate(jobs):
        todo.append((at, 0, f"p{number}", number))
    done: dict[str, Prompt] = {}
    now = 0.0
    while todo or machine.wake_at is not None:
        todo.sort()
        wake_at = machine.wake_at
        if todo and (wake_at is None or todo[0][0] < wake_at):
            now, kind, name, number = todo.pop(0)
            at, num_tokens, _, cached = jobs[number]
            if kind == 0:
                outcomes = machine.submit(prompt(name, num_tokens, number, at), now)
            else:
                outcomes = prepared(machine, name, now, min(cached, num_tokens - 1))
        else:
            assert wake_at is not None
            now = wake_at
            outcomes = machine.advance(now)
        for outcome in outcomes:
            if isinstance(outcome, Prepare):
                name = outcome.prompt.request_id
                number = int(name[1:])
                todo.append((now + jobs[number][2], 1, name, number))
            elif isinstance(outcome, Computed):
                assert outcome.prompt.request_id not in done
                done[outcome.prompt.request_id] = outcome.prompt
                _check_times(outcome.prompt, now, num_stages)
        machine.validate()
    assert len(done) == len(jobs)
    work = sum(p.num_tokens - p.cached for p in done.values())
    assert sum(p.compute_s for p in done.values()) == pytest.approx(work)


def _check_times(prompt: Prompt, now: float, num_stages: int) -> None:
    assert prompt.started_at is not None
    assert prompt.load_s >= 0
    assert prompt.started_at - prompt.submitted_at - prompt.load_s >= -1e-9
    if num_stages == 1:  # nobody overtakes within a step, so it takes at least its own time
        assert now - prompt.started_at >= prompt.compute_s - 1e-9
