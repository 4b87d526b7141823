"""Tests of prefill machines: order, preparation while computing, chunks, and pipelines of several machines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.protocol.step_time import PrefillProfile
from moonserve.traces.simulator import prefill

PROFILE = PrefillProfile(c0=0.0, c1=1.0, c2=0.0)  # one second per token


@dataclass(frozen=True)
class Job:
    """A prompt; its prefix takes `load_s` to load once it is prepared."""

    at: float
    num_tokens: int
    load_s: float = 0.0
    cached: int = 0
    rank: int = 0

    def prompt(self, number: int) -> prefill.Prompt:
        rank = (self.rank, number)
        return prefill.Prompt(request_id=f"p{number}", rank=rank, num_tokens=self.num_tokens, submitted_at=self.at)


def play(
    machine: prefill.PrefillMachine, jobs: Sequence[Job]
) -> tuple[list[prefill.ChunkStarted], list[tuple[float, prefill.Prompt]]]:
    """Returns chunks in order of their start, and prompts with their end times. Validates after every event."""
    todo = [(job.at, 0, number) for number, job in enumerate(jobs)]  # (time, 1 if its prefix is loaded, job number)
    chunks: list[prefill.ChunkStarted] = []
    done: list[tuple[float, prefill.Prompt]] = []
    while todo or machine.wake_at is not None:
        todo.sort()
        outcomes: list[Any]
        if todo and (machine.wake_at is None or todo[0][0] < machine.wake_at):
            now, is_loaded, number = todo.pop(0)
            job, name = jobs[number], f"p{number}"
            if is_loaded:
                outcomes = [*machine.landing_granted(name, now), *machine.prefix_loaded(name, job.cached, now)]
            else:
                outcomes = machine.submit(job.prompt(number), now)
        else:
            now = machine.wake_at or 0.0
            outcomes = machine.advance(now)
        for outcome in outcomes:
            if isinstance(outcome, prefill.Prepare):
                number = outcome.prompt.rank[1]
                todo.append((now + jobs[number].load_s, 1, number))
            elif isinstance(outcome, prefill.PromptComputed):
                done.append((now, outcome.prompt))
            else:
                chunks.append(outcome)
        machine.validate()
    return chunks, done


class Case(NamedTuple):
    """`chunks`: (prompt, first, end, end time) of each; `times`: seconds of (prefix load, computation) per prompt."""

    jobs: list[Job]
    chunks: list[tuple[int, int, int, float]]
    times: list[tuple[float, float]]
    chunk_tokens: int = 100
    profile: PrefillProfile = PROFILE
    fills_steps: bool = False


CASES = {
    "computed in chunks from where its prefix ends": Case(
        [Job(0.0, 10, cached=2)], [(0, 2, 7, 5.0), (0, 7, 10, 8.0)], [(0.0, 8.0)], chunk_tokens=5
    ),
    "a prefix that takes longer delays its prompt by the rest": Case(
        [Job(0.0, 10), Job(1.0, 10, load_s=12.0, cached=4)],
        [(0, 0, 10, 10.0), (1, 4, 10, 19.0)],
        [(0.0, 10.0), (3.0, 6.0)],
    ),
    "a later prompt that is ready does not wait for an earlier one that loads": Case(
        [Job(0.0, 10, load_s=1.0), Job(0.0, 5)], [(1, 0, 5, 5.0), (0, 0, 10, 15.0)], [(0.0, 10.0), (0.0, 5.0)]
    ),
    "a prompt of lower rank goes between the chunks of one that runs": Case(
        [Job(0.0, 10, rank=2), Job(1.0, 2, rank=1)],
        [(0, 0, 5, 5.0), (1, 0, 2, 7.0), (0, 5, 10, 12.0)],
        [(0.0, 10.0), (0.0, 2.0)],
        chunk_tokens=5,
    ),
    "a mixed chunk takes the whole next prompt, both wait for its end, the constant counts once": Case(
        [Job(0.0, 150), Job(0.0, 50), Job(0.0, 60)],
        [(0, 0, 100, 2.0), (0, 100, 150, 4.0), (1, 0, 50, 4.0), (2, 0, 60, 5.6)],
        [(0.0, 3.0), (0.0, 1.0), (0.0, 1.6)],
        profile=PrefillProfile(c0=1.0, c1=0.01, c2=0.0),
    ),
    "a filled chunk takes the beginning of the next prompt": Case(
        [Job(0.0, 150), Job(0.0, 150)],
        [(0, 0, 100, 2.0), (0, 100, 150, 4.0), (1, 0, 50, 4.0), (1, 50, 150, 6.0)],
        [(0.0, 3.0), (0.0, 3.0)],
        profile=PrefillProfile(c0=1.0, c1=0.01, c2=0.0),
        fills_steps=True,
    ),
    "in filled chunks, a prompt of lower rank waits for one that runs, not for one that waits": Case(
        [Job(0.0, 10, rank=2), Job(0.0, 4, rank=3), Job(1.0, 2, rank=1)],
        [(0, 0, 5, 5.0), (0, 5, 10, 10.0), (2, 0, 2, 15.0), (1, 0, 3, 15.0), (1, 3, 4, 16.0)],
        [(0.0, 10.0), (0.0, 4.0), (0.0, 2.0)],
        chunk_tokens=5,
        fills_steps=True,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_chunks_by_hand(case: Case) -> None:
    mixes = case.profile is not PROFILE
    machine = prefill.PrefillMachine(
        case.profile, chunk_tokens=case.chunk_tokens, mixes_prompts=mixes, fills_steps=case.fills_steps
    )
    chunks, done = play(machine, case.jobs)
    found = [(each.prompt.rank[1], each.first, each.end, each.ends_at) for each in chunks]
    assert found == [(*chunk[:3], pytest.approx(chunk[3])) for chunk in case.chunks]
    assert {prompt.rank[1]: at for at, prompt in done} == {number: ends_at for number, _, _, ends_at in found}
    by_number = sorted((prompt for _, prompt in done), key=lambda prompt: prompt.rank[1])
    assert [(prompt.load_s, prompt.compute_s) for prompt in by_number] == [pytest.approx(pair) for pair in case.times]


def test_a_few_prompts_are_prepared_ahead_and_one_that_overtakes_them_too() -> None:
    machine = prefill.PrefillMachine(PROFILE, chunk_tokens=100)
    waiting = [Job(0.0, 10, rank=1).prompt(number) for number in range(prefill.PREPARED_AHEAD + 3)]
    assert sum(len(machine.submit(each, 0.0)) for each in waiting) == prefill.PREPARED_AHEAD
    short = Job(0.0, 1).prompt(100)
    assert machine.submit(short, 0.0) == [prefill.Prepare(short)]
    machine.validate()


def test_a_cancelled_prompt_is_never_computed() -> None:
    machine = prefill.PrefillMachine(PROFILE, chunk_tokens=5)
    for number in range(2):
        machine.submit(Job(0.0, 10).prompt(number), 0.0)
        machine.landing_granted(f"p{number}", 0.0)
    machine.prefix_loaded("p0", 0, 0.0)
    for _ in range(2):
        assert machine.cancel("p0", 1.0) == []
    assert machine.advance(5.0) == []
    (chunk,) = machine.prefix_loaded("p1", 0, 6.0)
    assert isinstance(chunk, prefill.ChunkStarted)
    machine.validate()


@settings(deadline=None)
@given(
    jobs=st.lists(
        st.builds(Job, st.floats(0, 50), st.integers(1, 30), st.floats(0, 20)).flatmap(
            lambda job: st.integers(0, job.num_tokens - 1).map(lambda n: Job(job.at, job.num_tokens, job.load_s, n))
        ),
        min_size=1,
        max_size=15,
    ),
    chunk=st.integers(1, 12),
    num_stages=st.integers(1, 4),
)
def test_every_prompt_is_computed_once_and_its_time_adds_up(jobs: list[Job], chunk: int, num_stages: int) -> None:
    """Queue + load + pipeline time = end − submission, and work is conserved, for any arrivals, loads and pipelines."""
    _, done = play(prefill.PrefillMachine(PROFILE, chunk_tokens=chunk, num_stages=num_stages), jobs)
    assert sorted(prompt.rank[1] for _, prompt in done) == list(range(len(jobs)))
    for now, prompt in done:
        assert prompt.load_s >= 0
        assert prompt.started_at - prompt.submitted_at - prompt.load_s >= -1e-9
        if num_stages == 1:  # no prompt overtakes within a step, so each takes at least its own time
            assert now - prompt.started_at >= prompt.compute_s - 1e-9
    work = sum(job.num_tokens - job.cached for job in jobs)
    assert sum(prompt.compute_s for _, prompt in done) == pytest.approx(work)
