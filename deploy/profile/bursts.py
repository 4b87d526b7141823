"""What prompts of one moment and their answers say of a cluster: steps and handoffs beside prefill machines. Pure.

A burst is measured rather than one long answer beside one long prompt, because short stretches differ from long ones:
a decode machine that was idle is served first by the operating system, and one that computes for seconds is not; and
while a burst lasts, a prefill machine that hands one prompt off goes on with the next. Who computes when is known from
the workers' own reports, set on the client's clock. Knows no endpoint and fits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRun:
    """One prompt, seconds."""

    machine: str  # that computed it
    num_tokens: int
    num_cached: int
    num_others: int  # machines that computed beside it
    decodes_beside: bool  # one of them was a decode machine
    ttft_s: float  # at the client
    placed_s: float  # of it, until the conductor has placed it
    queue_s: float  # at the prefill worker, like the next two
    load_s: float
    compute_s: float
    handoff_s: float | None  # the second token's gap beyond a step; None where there was no step

    @property
    def request_s(self) -> float:
        """All that is not its worker's."""
        return self.ttft_s - self.queue_s - self.load_s - self.compute_s

    @property
    def back_s(self) -> float:
        """From its computing's end to its first token's coming to the client."""
        return self.request_s - self.placed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """Steps of a batch while nobody joined or left."""

    num_seqs: int
    prompt_tokens: int  # of each
    context_tokens: int  # of all together, generated ones too
    num_others: int
    seconds: float  # per step
    gaps_s: tuple[float, ...] = ()  # between tokens as their client sees them, of all sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One prompt of a burst and its answer; instants of the client's clock."""

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
    """Everything that was measured; `beside_prompts` are compared with each other only."""

    prompts: Sequence[PromptRun]
    steps: Sequence[StepRun]
    beside_prompts: Sequence[PromptRun]
    bursts: Sequence[Burst] = ()  # whose answers are as long as they usually are


_FEWEST_GAPS = 4  # that tell a step time


def steps_of(burst: Burst) -> list[StepRun]:
    """For each answer the steps that it lived through beside one number of prefill machines, its first gap left out."""
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
    """For each answer that has a step beside: how many prefill machines computed meanwhile, its own one too when that
    went on; and the seconds by which the second token's gap exceeds a step."""
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
