"""Derives the terms of a simulation from observations of a cluster: formulae, overheads, crowding factors. Pure.

The formulae apply to a machine that computes alone. A crowding factor is the time of the same work while others
compute ÷ its time alone. The prefill formula's constant is paid per step: a prompt of several chunks pays it several
times, as in the simulator's prefill machine. Knows no endpoint.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from statistics import fmean
from typing import TypeVar

import numpy as np

from moonserve.conductor.prediction.compute_time import DecodeFit, PrefillFit, fit_decode, fit_profile
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.step_time import DecodeProfile, PrefillProfile
from moonserve.traces.simulator.spec import CROWDED_BATCH, Crowding, Overheads


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRun:
    """Measurements of one prompt, in seconds."""

    machine: str  # prefill machine that computed it
    num_tokens: int
    num_cached: int
    num_others: int  # other machines that computed at the same time
    with_decode: bool  # one of them was a decode machine
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
class BurstPrompt:
    """One prompt of a burst and its answer. Times are on the client's clock."""

    prompt: PromptRun
    sent_at: float
    token_at: tuple[float, ...]

    @property
    def computes_from(self) -> float:
        return self.sent_at + self.prompt.placed_s + self.prompt.queue_s + self.prompt.load_s


Burst = Sequence[BurstPrompt]
"""Prompts sent at short intervals, with their answers. One long answer next to one long prompt would show other times:
the operating system favours a decode machine that was idle, but not one that computes for seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """All measurements. `concurrent_prompts` are compared only with each other."""

    prompts: Sequence[PromptRun]
    steps: Sequence[StepRun]
    concurrent_prompts: Sequence[PromptRun]
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


def _mean_later_gap(answered: BurstPrompt) -> float:
    return (answered.token_at[-1] - answered.token_at[1]) / (len(answered.token_at) - 2)


def _num_prefills(burst: Burst, at: float) -> int:
    computing = (each for each in burst if 0.0 <= at - each.computes_from < each.prompt.compute_s)
    return len({each.prompt.machine for each in computing})


def _num_decoding(burst: Burst, at: float) -> int:
    return sum(each.token_at[1] <= at <= each.token_at[-1] for each in burst if len(each.token_at) > 1)


# -- terms

_SHARES = 40  # parts of the sorted gaps: fine enough for a 90th percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTerms:
    """Terms that a simulation of this cluster needs in addition to its size."""

    prefill: PrefillFit
    decode: DecodeFit
    overheads: Overheads = field(default_factory=Overheads)
    crowding: Crowding = field(default_factory=Crowding)


def fit_terms(seen: Observations, chunk_tokens: int) -> ServingTerms:
    """Fits all terms. Raises ConfigError if too little was measured."""
    prefill = fit_chunked_prefill(seen.prompts, chunk_tokens)
    prefill = scale_to_all_machines(prefill, seen, chunk_tokens)
    steps = _medians(seen.steps, lambda run: (run.num_seqs, run.prompt_tokens), attrgetter("seconds"))
    decode = fit_decode(
        np.array([run.num_seqs for run, _ in steps]),
        np.array([run.context_tokens for run, _ in steps]),
        np.array([seconds for _, seconds in steps]),
    )
    return ServingTerms(
        prefill=prefill,
        decode=decode,
        overheads=overheads_of(seen),
        crowding=crowding_of(seen, prefill.profile, decode.profile),
    )


def fit_chunked_prefill(prompts: Sequence[PromptRun], chunk_tokens: int) -> PrefillFit:
    """Fits t = c0 · steps + c1·(n−p) + c2·(n²−p²) for prompts of n tokens, p of them cached."""
    runs = _medians(prompts, lambda run: (run.num_tokens, run.num_cached), attrgetter("compute_s"))
    tokens = np.array([run.num_tokens for run, _ in runs], np.int64)
    cached = np.array([run.num_cached for run, _ in runs], np.int64)
    seconds = np.array([seconds for _, seconds in runs], float)
    steps = -(-(tokens - cached) // chunk_tokens)
    columns = (steps, tokens - cached, tokens**2 - cached**2)
    return fit_profile(PrefillProfile, (tokens, cached), columns, seconds)


def scale_to_all_machines(fit: PrefillFit, seen: Observations, chunk_tokens: int) -> PrefillFit:
    """Scales the formula to the mean of all prefill machines, by prompts computed alone on each. Prompts sent alone go
    mostly to one machine, and machines differ in speed. Unchanged unless every machine has such prompts."""
    machines = {run.machine for run in seen.concurrent_prompts}

    def seconds(num_tokens: int, num_cached: int) -> float:
        starts = range(num_cached, num_tokens, chunk_tokens)
        ends = (min(start + chunk_tokens, num_tokens) for start in starts)
        return sum(fit.profile.seconds(end, start) for start, end in zip(starts, ends, strict=True))

    alone = _alone(seen, seconds)
    if len(machines) < 2 or machines - alone.keys():
        return fit
    mean, profile = float(np.mean(list(alone.values()))), fit.profile
    scaled = PrefillProfile(c0=mean * profile.c0, c1=mean * profile.c1, c2=mean * profile.c2)
    return replace(fit, profile=scaled)


def _alone(seen: Observations, seconds: Callable[[int, int], float]) -> dict[str, float]:
    """Returns by machine the median of actual ÷ formula when alone, for the shapes that are compared with others."""
    shapes = {(run.num_tokens, run.num_cached) for run in seen.concurrent_prompts}
    ratios: dict[str, list[float]] = {}
    for run in (*seen.prompts, *seen.concurrent_prompts):
        if run.num_others == 0 and (run.num_tokens, run.num_cached) in shapes:
            ratios.setdefault(run.machine, []).append(run.compute_s / seconds(run.num_tokens, run.num_cached))
    return {machine: float(np.median(found)) for machine, found in ratios.items()}


R = TypeVar("R")


def _medians(runs: Iterable[R], shape: Callable[[R], Hashable], seconds: Callable[[R], float]) -> list[tuple[R, float]]:
    """Returns one run of each shape, with the median seconds of all runs of that shape."""
    by_shape: dict[Hashable, list[R]] = {}
    for run in runs:
        by_shape.setdefault(shape(run), []).append(run)
    return [(alike[0], float(np.median([seconds(run) for run in alike]))) for alike in by_shape.values()]


def overheads_of(seen: Observations) -> Overheads:
    """Returns medians over prompts computed alone and over bursts. The landing is the wait of a prompt without a prefix
    before its first step. `serving.calibrated` sets the turnover: the rest of the bursts' TTFT."""
    alone = [run for run in seen.prompts if run.num_others == 0]
    back_s = _median([run.back_s for run in alone])
    prompts = [each.prompt for burst in seen.bursts for each in burst]
    late_s = [run.back_s - back_s for run in prompts if run.queue_s > run.compute_s / 2]
    return Overheads(
        request_s=_median([run.request_s for run in alone]),
        gateway_s=_gateway_s(seen, _median([run.placed_s for run in alone])),
        back_s=back_s,
        late_back_s=_median(late_s or [0.0]),
        landing_s=_median([run.load_s for run in alone if run.num_cached == 0]),
        handoff_s=_median(_handoffs_alone(seen)),
    )


def _gateway_s(seen: Observations, alone_s: float) -> float:
    """Returns the seconds that each other prompt of a burst adds to the time until a prompt is placed."""
    found = [
        (fmean(each.prompt.placed_s for each in burst) - alone_s) / (len(burst) - 1)
        for burst in seen.bursts
        if len(burst) > 1
    ]
    return _median(found or [0.0])


def _median(seconds: Sequence[float]) -> float:
    if not seconds:
        raise ConfigError("nothing was measured; a larger --budget-s gives time for more")
    return max(float(np.median(seconds)), 0.0)


def crowding_of(seen: Observations, prefill: PrefillProfile, decode: DecodeProfile) -> Crowding:
    """Returns all factors. Times are divided by the formula's, so that shapes may differ, then by the ratios alone."""
    alone = [run for run in seen.concurrent_prompts if run.num_others == 0]
    decoding = [*alone, *(run for run in seen.concurrent_prompts if run.with_decode)]
    prefills = [run for run in seen.concurrent_prompts if not run.with_decode]
    one, batch = _step_factors(seen, decode)
    by_machine = _alone(seen, prefill.seconds)
    return Crowding(
        prefill=_prefill_factors(decoding, prefill, by_machine),
        prefill_beside_prefills=_prefill_factors(prefills, prefill, by_machine),
        decode=one,
        decode_batch=batch,
        request=_factors([(run.num_others, run.request_s) for run in decoding]),
        request_beside_prefills=_factors([(run.num_others, run.request_s) for run in prefills]),
        landing=_factors([(run.num_others, run.load_s) for run in decoding]),
        landing_beside_prefills=_factors([(run.num_others, run.load_s) for run in prefills]),
        handoff=_handoff_factors(seen),
        gaps=_gaps(_in_bursts(seen), decode),
    )


def _step_factors(seen: Observations, decode: DecodeProfile) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns step factors of one sequence and of a batch; () for the second if only one of the two was measured.
    Factors that the batch lacks are those of one sequence."""
    runs: dict[bool, list[StepRun]] = {}  # by whether they are nearer to the batch's size
    for run in _in_bursts(seen):
        runs.setdefault(2 * run.num_seqs > CROWDED_BATCH + 1, []).append(run)
    if len(runs) < 2:
        return _burst_factors(next(iter(runs.values()), ()), decode), ()
    one, batch = _burst_factors(runs[False], decode), _burst_factors(runs[True], decode)
    return one, batch + one[len(batch) :]


def _in_bursts(seen: Observations) -> list[StepRun]:
    return [run for burst in seen.bursts for run in steps_of(burst)]


def _burst_factors(runs: Sequence[StepRun], decode: DecodeProfile) -> tuple[float, ...]:
    """Returns the total time of steps ÷ the formula's total. Stretches are short, and in some all tokens that had been
    delayed in others came at once."""
    actual, alone = defaultdict[int, float](float), defaultdict[int, float](float)  # seconds
    for run in runs:
        num_steps = len(run.gaps_s)
        actual[run.num_others] += num_steps * run.seconds
        alone[run.num_others] += num_steps * decode.step_s(run.num_seqs, run.context_tokens)
    return _factors([(0, 1.0), *((n, actual[n] / alone[n]) for n in actual if n)])


def _handoff_factors(seen: Observations) -> tuple[float, ...]:
    """Returns factors by the number of prefill machines that compute meanwhile, with or without the decode machine."""
    alone_s = _median(_handoffs_alone(seen))
    found = [handoff for burst in seen.bursts for handoff in handoffs_of(burst) if handoff[0]]
    if not found or alone_s <= 0.0:
        return ()
    return _factors([(0, 1.0), *((num_prefills, s / alone_s) for num_prefills, s in found)])


def _handoffs_alone(seen: Observations) -> list[float]:
    """Returns the handoff seconds of prompts computed alone."""
    found = (run.handoff_s for run in seen.prompts if run.num_others == 0)
    return [seconds for seconds in found if seconds is not None]


def _prefill_factors(
    runs: Sequence[PromptRun], prefill: PrefillProfile, alone: Mapping[str, float]
) -> tuple[float, ...]:
    """Returns prefill factors. `alone`: actual ÷ formula by machine; each of several machines counts the same."""
    ratios = [(run.num_others, run.compute_s / prefill.seconds(run.num_tokens, run.num_cached)) for run in runs]
    if len(alone) > 1:
        ratios = [(0, ratio) for ratio in alone.values()] + [each for each in ratios if each[0]]
    return _factors(ratios)


def _gaps(runs: Sequence[StepRun], decode: DecodeProfile) -> tuple[tuple[float, ...], ...]:
    """Returns the distributions of gaps ÷ formula step, with mean 1: they show how tokens are bunched. The divisor is
    not the mean of the gap's own stretch, because whole stretches also come at once while others wait. So half of all
    gaps may be far shorter than the mean."""
    by_others: dict[int, list[float]] = {}
    for run in runs:
        expected_s = decode.step_s(run.num_seqs, run.context_tokens)
        by_others.setdefault(run.num_others, []).extend(gap / expected_s for gap in run.gaps_s)
    spread: list[tuple[float, ...]] = []
    while found := by_others.get(len(spread)):
        spread.append(_quantile_means(found))
    return tuple(spread)


def _quantile_means(gaps: Sequence[float]) -> tuple[float, ...]:
    """Returns means of equal parts of the sorted gaps ÷ the mean of all. The few longest gaps keep most of the time."""
    passed = np.concatenate([[0.0], np.cumsum(np.sort(np.array(gaps, float)))])
    ends = np.interp(np.linspace(0, len(gaps), _SHARES + 1), np.arange(len(passed)), passed)
    return tuple((np.diff(ends) * _SHARES / ends[-1]).tolist())


def _factors(ratios: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    """Returns median ratios by number of others, up to the first number that was not measured, relative to 0 others.
    None is below 1, because others make no work faster. What takes no time, such as loads of vLLM workers, stays so."""
    by_others: dict[int, list[float]] = {}
    for num_others, ratio in ratios:
        by_others.setdefault(num_others, []).append(ratio)
    factors: list[float] = []
    while (found := by_others.get(len(factors))) is not None:
        factors.append(float(np.median(found)))
    return tuple(max(factor / factors[0], 1.0) if factors[0] else 1.0 for factor in factors)
