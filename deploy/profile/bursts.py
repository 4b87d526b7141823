"""What prompts of one moment and their answers say of a cluster: steps and handoffs beside prefill machines. Pure.

A burst is measured rather than one long answer beside one long prompt, because short stretches differ from long ones:
a decode machine that was idle is served first by the operating system, and one that computes for seconds is not; and
while a burst lasts, a prefill machine that hands one prompt off goes on with the next. Who computes when is known from
the workers' own reports, set on the client's clock. Knows no endpoint and fits nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


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
    second_gap_s: float | None  # between the first and the second token
    step_s: float | None  # between later ones


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

    machine: str  # that computed it
    num_tokens: int
    sent_at: float
    placed_s: float  # after that
    computes_from: float
    computes_until: float
    token_at: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """Everything that was measured; `beside_*` belong together and are compared with each other only."""

    prompts: Sequence[PromptRun]
    steps: Sequence[StepRun]
    beside_prompts: Sequence[PromptRun]
    beside_steps: Sequence[StepRun]
    # Of prompts sent at one moment: what each takes of the time until the next one is placed, and those that were
    # computed right after another.
    bursts_s: Sequence[float] = ()
    in_a_row: Sequence[PromptRun] = ()
    answered: Sequence[
        Sequence[Answered]
    ] = ()  # bursts whose answers are as long as they usually are


_FEWEST_GAPS = 4  # that tell a step time


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffRun:
    """One handoff: the second token's gap beyond a step."""

    num_prefills: int  # machines that computed meanwhile; the prompt's own is one when it went on
    seconds: float


def steps_of(burst: Sequence[Answered]) -> list[StepRun]:
    """For each answer the steps that it lived through beside one number of prefill machines, its first gap left out."""
    found: list[StepRun] = []
    for each in burst:
        by_company: dict[int, list[tuple[int, float, float]]] = {}
        for number, (sooner, later) in enumerate(pairwise(each.token_at)):
            if number:
                middle = (sooner + later) / 2
                gap = (number, later - sooner, _num_decoding(burst, middle))
                by_company.setdefault(_num_prefills(burst, middle), []).append(gap)
        found += [
            _step_run(each, others, gaps) for others, gaps in by_company.items() if _tell(gaps)
        ]
    return found


def handoffs_of(burst: Sequence[Answered]) -> list[HandoffRun]:
    """One for each answer that has a step beside."""
    return [
        HandoffRun(
            num_prefills=_num_prefills(burst, (each.token_at[0] + each.token_at[1]) / 2),
            seconds=max(each.token_at[1] - each.token_at[0] - _mean_later_gap(each), 0.0),
        )
        for each in burst
        if len(each.token_at) > _FEWEST_GAPS
    ]


def _tell(gaps: Sequence[tuple[int, float, float]]) -> bool:
    return len(gaps) >= _FEWEST_GAPS and any(seconds > 0.0 for _, seconds, _ in gaps)


def _step_run(
    answered: Answered, num_others: int, gaps: Sequence[tuple[int, float, float]]
) -> StepRun:
    num_seqs = _mean(decoding for _, _, decoding in gaps)
    tokens = answered.num_tokens + _mean(number for number, _, _ in gaps)
    return StepRun(
        num_seqs=max(round(num_seqs), 1),
        prompt_tokens=answered.num_tokens,
        context_tokens=round(num_seqs * tokens),
        num_others=num_others,
        seconds=_mean(seconds for _, seconds, _ in gaps),
        gaps_s=tuple(seconds for _, seconds, _ in gaps),
    )


def _mean_later_gap(answered: Answered) -> float:
    return (answered.token_at[-1] - answered.token_at[1]) / (len(answered.token_at) - 2)


def _num_prefills(burst: Sequence[Answered], at: float) -> int:
    return len({each.machine for each in burst if each.computes_from <= at < each.computes_until})


def _num_decoding(burst: Sequence[Answered], at: float) -> int:
    return sum(
        each.token_at[1] <= at <= each.token_at[-1] for each in burst if len(each.token_at) > 1
    )


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
