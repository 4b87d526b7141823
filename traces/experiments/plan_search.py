"""The search for a cluster: successive halving on growing parts of the trace. Pure: the caller simulates.

Divisions, at most 15 evenly spaced ones, are tried on the first eighth of the trace, the best of them on the first
quarter, the best two on all of it (Jamieson and Talwalkar, 2016: most effort goes to the few that may win). Policies
join at the quarter, since they matter less than the division. Caches come last, on the whole trace, since a part of it
never fills them. The smallest cluster is found by bisection, assuming that a larger one is no worse. **The search is
deterministic, and its number of simulations is bounded** by the number of machines: see `bound`.

It misses a division that is bad in the first eighth and best later.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moonserve.traces.request_metrics import ratio
from moonserve.traces.simulator.results import SimulationResult, summary

_MERIT_DECIMALS = 3  # significant decimals of shares: a tenth of a per cent is noise of the trace


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateCluster:
    """A cluster: machines per role, placement policy, and cache size of each prefill machine."""

    num_prefill: int
    num_decode: int
    policy: str
    dram_tokens: int  # of KV per prefill machine

    @property
    def num_machines(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def division(self) -> str:
        return f"{self.num_prefill}P{self.num_decode}D"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Figures of one simulation. Latencies are in milliseconds, NaN if nothing completed."""

    effective: float  # share of all requests, including rejected ones
    goodput: float  # effective requests per second
    mean_ttft_ms: float
    p90_ttft_ms: float
    p90_tbt_ms: float
    hit_ratio: float
    rejected: float  # share of all requests

    @property
    def merit(self) -> tuple[float, float]:
        """Sort key, greater is better: effective requests, then shorter TTFT."""
        ttft = self.mean_ttft_ms
        return (round(self.effective, _MERIT_DECIMALS), -ttft if ttft == ttft else float("-inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A cluster and its score on a part of the trace."""

    cluster: CandidateCluster
    score: Score
    share: float  # of the trace's requests, from the first one


def score_of(result: SimulationResult) -> Score:
    """Returns the score of a result, by the objectives of its simulation."""
    figures = summary(result)
    return Score(
        effective=figures["effective_fraction"],
        goodput=figures["request_goodput"],
        mean_ttft_ms=figures["mean_ttft_ms"],
        p90_ttft_ms=figures["p90_ttft_ms"],
        p90_tbt_ms=figures["p90_tbt_ms"],
        hit_ratio=figures["hit_ratio"],
        rejected=ratio(figures["rejected"], figures["num_requests"]),
    )


_FIRST, _SECOND, _WHOLE = 0.125, 0.25, 1.0
_KEPT_FIRST, _KEPT_SECOND = 3, 2
_MAX_DIVISIONS = 15  # tried in the first round; divisions between them may follow in the next one
_CACHE_HALVINGS = 4
_MAX_LOSS = 0.005  # share of effective requests that a smaller cache may cost


Evaluate = Callable[[Sequence[CandidateCluster], float], Sequence[Score]]
"""Simulates the first share of the trace on each cluster. Returns scores in the order of the clusters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequirements:
    """The requirements for a cluster."""

    num_machines: int  # maximum
    target: float  # share of effective requests
    policies: tuple[str, ...]  # divisions are compared with the first one
    dram_tokens: int  # of a prefill machine; smaller caches are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer, with scores on the whole trace."""

    best: Scored  # with all machines
    rivals: tuple[Scored, ...]  # other clusters of the last round, best first
    caches: tuple[Scored, ...]  # the best cluster with ever smaller caches
    smallest_cache: Scored  # the smallest cache that costs hardly any effective requests
    smallest: Scored | None  # the smallest that meets the target; None = no cluster does
    too_small: Scored | None  # the best with one machine fewer; None = there is none


def plan(question: PlanRequirements, evaluate: Evaluate) -> Plan:
    """Searches for a plan. Equal questions and scores give equal plans."""
    finalists = _best(question, question.num_machines, question.policies, evaluate)
    best = finalists[0]
    sizes = [question.dram_tokens >> n for n in range(1, _CACHE_HALVINGS + 1)]
    smaller = [replace(best.cluster, dram_tokens=size) for size in sizes if size]
    caches = _scored(smaller, _WHOLE, evaluate)
    smallest, too_small = _smallest(question, best, evaluate)
    return Plan(
        best=best,
        rivals=tuple(finalists[1:]),
        caches=tuple(caches),
        smallest_cache=_smallest_cache(best, caches),
        smallest=smallest,
        too_small=too_small,
    )


def max_simulations(question: PlanRequirements) -> float:
    """Returns the maximum number of simulations, in units of the whole trace."""
    machines = question.num_machines
    divisions = min(machines - 1, _MAX_DIVISIONS)
    seconds = _KEPT_FIRST * (1 if divisions == machines - 1 else 3)  # with the neighbours of each
    first = divisions * _FIRST + seconds * len(question.policies) * _SECOND + _KEPT_SECOND
    steps = math.ceil(math.log2(max(machines, 2)))
    return first + _CACHE_HALVINGS + steps * (divisions * _FIRST + seconds * _SECOND + _KEPT_SECOND)


def _smallest_cache(best: Scored, caches: Sequence[Scored]) -> Scored:
    """Returns the smallest cache before the first bad one. A smaller one that is good by chance is not trusted."""
    thrifty = best
    for each in caches:
        if each.score.effective < best.score.effective - _MAX_LOSS:
            break
        thrifty = each
    return thrifty


def _best(question: PlanRequirements, num_machines: int, policies: Sequence[str], evaluate: Evaluate) -> list[Scored]:
    """Returns the finalists on the whole trace, best first."""
    step = max(math.ceil((num_machines - 1) / _MAX_DIVISIONS), 1)
    divisions = list(range(1, num_machines, step))
    coarse = _clusters(question, num_machines, divisions, policies[:1])
    first = _by_merit(_scored(coarse, _FIRST, evaluate))
    kept = {each.cluster.num_prefill for each in first[:_KEPT_FIRST]}
    if step > 1:  # divisions between the coarse ones were left out
        around = {n + offset for n in kept for offset in (-(step // 2), 0, step // 2)}
        kept = {n for n in around if 1 <= n < num_machines}
    finer = _clusters(question, num_machines, sorted(kept), policies)
    second = _by_merit(_scored(finer, _SECOND, evaluate))
    finalists = [each.cluster for each in second[:_KEPT_SECOND]]
    return _by_merit(_scored(finalists, _WHOLE, evaluate))


def _clusters(
    question: PlanRequirements, num_machines: int, divisions: Sequence[int], policies: Sequence[str]
) -> list[CandidateCluster]:
    return [
        CandidateCluster(
            num_prefill=num_prefill,
            num_decode=num_machines - num_prefill,
            policy=policy,
            dram_tokens=question.dram_tokens,
        )
        for num_prefill in divisions
        for policy in policies
    ]


def _scored(clusters: Sequence[CandidateCluster], share: float, evaluate: Evaluate) -> list[Scored]:
    """Returns the clusters with their scores, in the same order."""
    scores = evaluate(clusters, share)
    return [Scored(cluster=cluster, score=score, share=share) for cluster, score in zip(clusters, scores, strict=True)]


def _by_merit(scored: Sequence[Scored]) -> list[Scored]:
    """Returns them sorted, best first. Equal ones keep their order."""
    return sorted(scored, key=lambda each: each.score.merit, reverse=True)


def _smallest(question: PlanRequirements, best: Scored, evaluate: Evaluate) -> tuple[Scored | None, Scored | None]:
    """Returns the smallest cluster that meets the target, and the best with one machine fewer, which does not."""
    if best.score.effective < question.target:
        return None, None
    enough, short = best, None
    low, high = 1, question.num_machines  # low: too few (one machine is no cluster); high: enough
    while high - low > 1:
        middle = (low + high) // 2
        found = _best(question, middle, (best.cluster.policy,), evaluate)[0]
        if found.score.effective >= question.target:
            high, enough = middle, found
        else:
            low, short = middle, found
    return enough, short
