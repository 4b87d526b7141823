"""Tests that the closed form of a decode machine equals the live worker's state machine, run step by step."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonserve.decode_worker.decisions import events
from moonserve.engine.model.batch import Slice
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.step_time import DecodeProfile, PrefillProfile
from moonserve.traces.simulator.decode import DecodeMachine, LandingGranted
from moonserve.traces.simulator.sequence import Finished
from moonserve.traces.simulator.spec import ModelProfile
from tests.decode_worker.driver import BLOCK_SIZE, Driver, request_of
from tests.prefill_worker.builders import all_of
from tests.thoroughness import examples
from tests.traces.simulator.small import MODEL

FOREVER = 1_000_000_000


def fractions(least: int, most: int) -> st.SearchStrategy[Fraction]:
    """Draws fractions, which are exact and rarely coincide."""
    return st.integers(least * 997, most * 997).map(lambda n: Fraction(n, 997))


def model(num_blocks: int, max_num_seqs: int, decode: DecodeProfile) -> ModelProfile:
    prefill = PrefillProfile(c0=0, c1=Fraction(1, 7), c2=Fraction(1, 101))  # type: ignore[arg-type]
    changes = {"device_tokens": num_blocks * BLOCK_SIZE, "max_num_seqs": max_num_seqs}
    return replace(MODEL, prefill=prefill, decode=decode, **changes)


class Token(NamedTuple):
    """Outcome: a step sampled a token of this request."""

    request_id: str


class LiveMachine:
    """The live worker's state machine in virtual time, one event per step. It has the methods of `DecodeMachine`."""

    def __init__(self, model: ModelProfile, chunk: int) -> None:
        self._model = model
        limits = {"max_num_seqs": model.max_num_seqs, "max_num_batched_tokens": chunk, "max_model_len": FOREVER}
        self._driver = Driver(model.device_tokens // BLOCK_SIZE, caches=False, **limits)
        self.wake_at: Any = None
        self.validate = self._driver.state.validate

    def reserve(self, name: str, num_tokens: int, now: Any) -> list[Any]:
        return self._after(now, lambda: self._driver.reserve(range(num_tokens), name, ttl_s=FOREVER, wait_s=FOREVER))

    def land(self, name: str, num_tokens: int, num_outputs: int, granted_at: Any, now: Any) -> list[Any]:
        request = request_of(range(num_tokens), name, max_tokens=num_outputs + 1, timeout_s=FOREVER)
        return self._after(now, lambda: self._driver.commit(request))

    def cancel(self, name: str, now: Any) -> list[Any]:
        return self._after(now, lambda: self._driver.cancel(name))

    def advance(self, now: Any) -> list[Any]:
        tokens = [Token(piece.request_id) for piece in self._driver.steps[0].slices if piece.samples]
        self.wake_at = None
        return tokens + self._after(now, self._driver.compute)

    def _after(self, now: Any, do: Callable[[], object]) -> list[Any]:
        """Returns the outcomes of an event and of the end of all landings that it lets end."""
        self._driver.now, begin = now, len(self._driver.log)
        do()
        self._driver.drain_landing()
        done = self._driver.log[begin:]
        for step in all_of(done, events.RunStep):
            self.wake_at = now + self._step_s(step.slices)
        return [LandingGranted(each.lease_id.removeprefix("lease-")) for each in all_of(done, events.GrantLease)]

    def _step_s(self, slices: Sequence[Slice]) -> Any:
        contexts = [len(s.token_ids) for s in slices if s.start + 1 == len(s.token_ids)]
        seconds = self._model.decode.step_s(len(contexts), sum(contexts)) if contexts else 0
        behind = [s for s in slices if s.start + 1 != len(s.token_ids)]
        return seconds + sum(self._model.prefill.seconds(s.end, s.start) for s in behind)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A landing that is requested at `at`. Its KV arrives `carried_s` after the grant."""

    num_tokens: int
    num_outputs: int  # after the first token
    at: Fraction = Fraction(0)
    carried_s: Fraction = Fraction(0)
    cancelled_after_s: Fraction | None = None  # after `at`


def play(machine: Any, prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """Returns the grant time and token times of each granted request. At equal times, the end of a step comes first."""
    order = itertools.count()  # order of events with equal times
    by_name = {f"r{number}": prompt for number, prompt in enumerate(prompts)}
    heap: list[tuple[Any, int, str, str]] = []
    for name, prompt in by_name.items():
        heapq.heappush(heap, (prompt.at, next(order), "reserve", name))
        if prompt.cancelled_after_s is not None:
            heapq.heappush(heap, (prompt.at + prompt.cancelled_after_s, next(order), "cancel", name))
    token_at: dict[str, list[Any]] = {}
    cancelled: set[str] = set()
    while heap or machine.wake_at is not None:
        if not heap or (machine.wake_at is not None and heap[0][0] >= machine.wake_at):
            now = machine.wake_at
            outcomes = machine.advance(now)
        else:
            now, _, kind, name = heapq.heappop(heap)
            prompt = by_name[name]
            if name in cancelled:
                continue
            if kind == "reserve":
                outcomes = machine.reserve(name, prompt.num_tokens, now)
            elif kind == "land":
                outcomes = machine.land(name, prompt.num_tokens, prompt.num_outputs, token_at[name][0], now)
            else:
                cancelled.add(name)
                outcomes = machine.cancel(name, now)
        for outcome in outcomes:
            if isinstance(outcome, LandingGranted):
                name = outcome.request_id
                token_at[name] = [now]
                heapq.heappush(heap, (now + by_name[name].carried_s, next(order), "land", name))
            elif isinstance(outcome, Token):
                token_at[outcome.request_id].append(now)
            elif isinstance(outcome, Finished):
                instants = token_at[outcome.sequence.request_id]
                for gap in outcome.gaps_s:
                    instants.append(instants[-1] + gap)
                assert instants[-1] == outcome.at
        machine.validate()
    return token_at


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
# The longest prompt's decoding preempts the last prompt. A cancelled landing frees four blocks, which the preempted
# prompt gets from the next step on.
FREED = [
    *[Prompt(num_tokens=1, num_outputs=1)] * 6,
    Prompt(num_tokens=9, num_outputs=6),
    Prompt(num_tokens=22, num_outputs=5),
    Prompt(num_tokens=13, num_outputs=1, carried_s=Fraction(7), cancelled_after_s=Fraction(12195, 997)),
    Prompt(num_tokens=7, num_outputs=2),
]


@settings(max_examples=examples(75), deadline=None)
@given(
    profile=PROFILES,
    num_blocks=st.integers(8, 40),
    max_num_seqs=st.integers(1, 6),
    chunk=st.integers(8, 20),
    prompts=st.lists(PROMPTS, min_size=1, max_size=12),
)
@example(DecodeProfile(c0=1, c1=Fraction(515, 997), c2=0), 17, 6, 8, FREED)  # type: ignore[arg-type]
def test_every_token_comes_when_the_live_worker_would_send_it(
    profile: DecodeProfile, num_blocks: int, max_num_seqs: int, chunk: int, prompts: list[Prompt]
) -> None:
    """All token times of requests that are not cancelled are equal in exact arithmetic, with limited slots, growth,
    preemption, recomputation and cancellation."""
    given_model = model(num_blocks, max_num_seqs, profile)
    fitting = [p for p in prompts if p.num_tokens + p.num_outputs <= num_blocks * BLOCK_SIZE]
    live = play(LiveMachine(given_model, chunk), fitting)
    machine = DecodeMachine(given_model, BLOCK_SIZE, chunk)
    simulated = play(machine, fitting)
    assert machine.free_blocks == machine.num_blocks
    assert set(simulated) == set(live)
    for name, instants in live.items():
        if fitting[int(name[1:])].cancelled_after_s is None:
            assert simulated[name] == instants


def test_a_prompt_that_never_fits_is_refused() -> None:
    machine = DecodeMachine(model(2, 4, DecodeProfile(c0=1, c1=0, c2=0)), BLOCK_SIZE, 16)
    with pytest.raises(InvalidRequest):
        machine.reserve("r", 2 * BLOCK_SIZE, 0.0)
