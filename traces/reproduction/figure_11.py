"""Figure 11 of FAST'25: number of machines that hold the popular blocks, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from traces.reproduction.figure import Figure, Finding, Line, Plot, Results, Row, Subject
from traces.reproduction.testbed import MOONCAKE, NUM_RANKS, pooled
from traces.simulator.many import Work
from traces.simulator.results import ReplicaSample

_RANKS = (1, 10, 100, NUM_RANKS)
_RUN = "pool"

_WHY = (
    "The paper shows curves without numbers: the top keys reach almost every prefill instance, those of low rank a"
    " few. Nobody replicates on purpose here either: a machine that fetched a prefix keeps it until its memory is"
    " full. Only the block that all prompts begin with is everywhere all the time. The next ranks are the heads of"
    " a few busy sessions, whole chains of equal rank, which are copied when their machine is busy and evicted when"
    " they have not been used for about a quarter of an hour; so their curves rise and fall."
)


def runs(_subject: Subject) -> Mapping[str, Work]:
    return {_RUN: pooled()}


def finding(subject: Subject, results: Results) -> Finding:
    samples = results[_RUN].replicas
    machines = MOONCAKE.num_prefill
    top = _mean_of_top(samples[-1], 10)
    peak = max(_mean_of_top(sample, 10) for sample in samples)
    rows = [
        Row(f"machines with the block of rank {rank:,}, at the end", _at_rank(samples[-1], rank)) for rank in _RANKS
    ]
    rows += [
        Row("mean over the ten most popular, at the end", top),
        Row("the same at their peak", peak),
        Row("the same over time", _over_time(samples, 10)),
        Row(f"mean over the {NUM_RANKS:,} most popular, over time", _over_time(samples, NUM_RANKS)),
    ]
    plot = Plot(
        f"Machines (of {machines}) with the block of a rank",
        "minutes",
        "machines",
        tuple(_line(samples, rank) for rank in _RANKS),
    )
    return Finding(
        rows=tuple(rows),
        claims={
            "the most popular block lies on every machine at the end": (_at_rank(samples[-1], 1) == machines),
            "the ten most popular lie on three quarters of the machines at their peak": (peak >= 0.75 * machines),
            "and over time on more machines than the thousand most popular": (
                _over_time(samples, 10) > _over_time(samples, NUM_RANKS)
            ),
        },
        plots=(plot,),
        why=_WHY,
    )


def _line(samples: Sequence[ReplicaSample], rank: int) -> Line:
    points = ((each.at_s / 60, _at_rank(each, rank)) for each in samples)
    return Line(f"rank {rank:,}", tuple((x, y) for x, y in points if y is not None))


def _at_rank(sample: ReplicaSample, rank: int) -> float | None:
    """Returns the replicas at a rank; None if there are fewer blocks."""
    return sample.replicas[rank - 1] if rank <= len(sample.replicas) else None


def _mean_of_top(sample: ReplicaSample, count: int) -> float:
    top = sample.replicas[:count]
    return sum(top) / len(top) if top else 0.0


def _over_time(samples: Sequence[ReplicaSample], count: int) -> float:
    return sum(_mean_of_top(sample, count) for sample in samples) / len(samples)


FIGURE = Figure(
    name="figure-11",
    title="Figure 11: replicas of popular blocks",
    setting="8 prefill and 8 decode machines, sampled every 30 s; rank by uses so far.",
    runs=runs,
    finding=finding,
)
