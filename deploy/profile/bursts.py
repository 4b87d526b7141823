"""Derives decode steps and handoffs, by the prefill machines that compute meanwhile, from bursts of prompts. Pure.

A burst is measured instead of one long answer next to one long prompt, because short stretches differ from long ones.
The operating system favours a decode machine that was idle, but not one that computes for seconds. During a burst, a
prefill machine continues with the next prompt after a handoff. The workers' own reports, converted to the client's
clock, show which machine computes when. Knows no endpoint and fits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRun:
    """Measurements of one prompt, in seconds."""

    machine: str  # prefill machine that computed it
    num_tokens: int
    num_cached: int
    num_others: int  # other machines that computed at the same time
    decodes_beside: bool  # one of them was a decode machine
    ttft_s: float  # at the client
    placed_s: float  # part of ttft_s until the conductor has placed the prompt
    queue_s: float  # at the prefill worker, like the next two
    load_s: float
    compute_s: float
    handoff_s: float | None  # the second token's gap minus a step; None without later steps

    @property
    def request_s(self) -> float:
        """TTFT without the prefill worker's part."""
        return self.ttft_s - self.queue_s - self.load_s - self.compute_s

    @property
    def back_s(self) -> float:
        """Time from the end of prefill to the arrival of the first token at the client."""
        return self.request_s - self.placed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """Steps of a batch while no sequence joined or left."""

    num_seqs: int
    prompt_tokens: int  # of each
    context_tokens: int  # of all sequences together, including generated tokens
    num_others: int
    seconds: float  # per step
    gaps_s: tuple[float, ...] = ()  # between tokens at the client, of all sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One prompt of a burst and its answer. Times are on the client's clock."""

    prompt: PromptRun
    sent_at: float
    token_at: tuple[float, ...]

    @property
    def computes_from(self) -> float:
        return self.sent_at + self.prompt.placed_s + self.prompt.queue_s + self.prompt.load_s

    @property
    def computes_until(self) -> float:
        return self.computes_from + self.prompt.compute_s


Burst = Sequence[Answered]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """All measurements. `beside_prompts` are compared only with each other."""

    prompts: Sequence[PromptRun]
    steps: Sequence[StepRun]
    beside_prompts: Sequence[PromptRun]
    bursts: Sequence[Burst] = ()  # with answers of the expected load's length


_FEWEST_GAPS = 4  # needed for a step time


def steps_of(burst: Burst) -> list[StepRun]:
    """Returns each answer's steps, one run per number of prefill machines that computed meanwhile. Omits first gaps."""
    found: list[StepRun] = []
    for each in burst:
        by_company: dict[int, list[tuple[int, float, float]]] = {}
        for number, (sooner, later) in enumerate(pairwise(each.token_at)):
            if number:
                middle = (sooner + later) / 2
                gap = (number, later - sooner, _num_decoding(burst, middle))
                by_company.setdefault(_num_prefills(burst, middle), []).append(gap)
        for num_others, gaps in by_company.items():
            numbers, seconds, decoding = zip(*gaps, strict=True)
            if len(gaps) < _FEWEST_GAPS or not any(seconds):
                continue
            num_seqs, num_tokens = fmean(decoding), each.prompt.num_tokens
            found.append(
                StepRun(
                    num_seqs=max(round(num_seqs), 1),
                    prompt_tokens=num_tokens,
                    context_tokens=round(num_seqs * (num_tokens + fmean(numbers))),
                    num_others=num_others,
                    seconds=fmean(seconds),
                    gaps_s=seconds,
                )
            )
    return found


def handoffs_of(burst: Burst) -> list[tuple[int, float]]:
    """Returns for each answer with enough gaps the number of prefill machines that computed meanwhile, including its
    own if that continued, and the seconds by which the second token's gap exceeds a step."""
    return [
        (
            _num_prefills(burst, (each.token_at[0] + each.token_at[1]) / 2),
            max(each.token_at[1] - each.token_at[0] - _mean_later_gap(each), 0.0),
        )
        for each in burst
        if len(each.token_at) > _FEWEST_GAPS
    ]


def _mean_later_gap(answered: Answered) -> float:
    return (answered.token_at[-1] - answered.token_at[1]) / (len(answered.token_at) - 2)


def _num_prefills(burst: Burst, at: float) -> int:
    computing = (each for each in burst if each.computes_from <= at < each.computes_until)
    return len({each.prompt.machine for each in computing})


def _num_decoding(burst: Burst, at: float) -> int:
    return sum(each.token_at[1] <= at <= each.token_at[-1] for each in burst if len(each.token_at) > 1)
