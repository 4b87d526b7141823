"""Figure 13 of FAST'25: TTFT by network bandwidth of the machines."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from traces.reproduction.figure import Figure, Finding, Line, Plot, Results, Row, Subject
from traces.reproduction.testbed import MOONCAKE, mean_ttft_s, p90_tbt_s, pooled
from traces.simulator.many import Work

_GBIT = (24, 50, 100, 200, 400)
_BYTES_PER_GBIT = 1e9 / 8
_KNEE = 100
_UNDER_S = 2.0

_WHY = (
    "A prompt of 12,000 tokens is 3.7 GiB of KV, all of which goes to the decode machine: 13 Gbit/s per prefill"
    " machine on average at the trace's own speed, 16 with what is fetched. Above that our TTFT hardly depends on"
    " the network: the first token leaves when the prompt is computed, layers are streamed meanwhile, links are"
    " shared fairly and without loss, and Algorithm 1 computes a prefix again where fetching it is slow. So ours"
    " rises by a fifth at 24 Gbit/s where the testbed's rises sharply from 100 down. Here the sharp rise is in the"
    " second token, which waits until all KV is at the decode machine, and so in TBT (lower rows): a TTFT that is taken"
    " where decoding begins would show it. Below 16 Gbit/s more is sent than the links carry, and no TTFT is bounded."
)


def runs(_subject: Subject) -> Mapping[str, Work]:
    model = MOONCAKE.model
    return {f"{gbit}": pooled(model=replace(model, nic_bytes_per_s=gbit * _BYTES_PER_GBIT)) for gbit in _GBIT}


def finding(_subject: Subject, results: Results) -> Finding:
    means = {gbit: mean_ttft_s(results[f"{gbit}"]) for gbit in _GBIT}
    rows = [
        Row(
            f"mean TTFT at {gbit} Gbit/s",
            seconds,
            published=_UNDER_S if gbit >= _KNEE else None,
            unit="s",
            why="published: less than" if gbit >= _KNEE else "",
        )
        for gbit, seconds in means.items()
    ]
    tbts = {gbit: p90_tbt_s(results[f"{gbit}"]) for gbit in _GBIT}
    rows += [Row(f"p90 TBT at {gbit} Gbit/s", seconds, unit="s") for gbit, seconds in tbts.items()]
    plot = Plot(
        "Mean TTFT, and p90 of TBT",
        "Gbit/s per machine",
        "seconds",
        (Line("mean TTFT", tuple(means.items())), Line("p90 TBT", tuple(tbts.items()))),
        log_x=True,
        log_y=True,
    )
    return Finding(rows=tuple(rows), claims=_claims(means, tbts), plots=(plot,), why=_WHY)


def _claims(means: Mapping[int, float], tbts: Mapping[int, float]) -> dict[str, bool]:
    """`means`: mean TTFT by Gbit/s. `tbts`: p90 TBT by Gbit/s."""
    fast = means[_GBIT[-1]]
    return {
        "below 2 s from 100 Gbit/s on": all(s < _UNDER_S for gbit, s in means.items() if gbit >= _KNEE),
        "flat above 100 Gbit/s: 100 and 400 differ by less than 15 %": means[_KNEE] <= 1.15 * fast,
        "the slower the network, the longer, and most so at the low end": _falls_ever_less(list(means.values())),
        "a sharp rise below 100: at 24 Gbit/s twice the TTFT of 400": means[_GBIT[0]] >= 2 * fast,
        "the sharp rise is in the wait for KV: at 24 Gbit/s ten times the p90 TBT of 400": (
            tbts[_GBIT[0]] >= 10 * tbts[_GBIT[-1]]
        ),
    }


def _falls_ever_less(values: Sequence[float]) -> bool:
    steps = [before - after for before, after in itertools.pairwise(values)]
    return steps == sorted(steps, reverse=True) and steps[-1] >= 0


FIGURE = Figure(
    name="figure-13",
    title="Figure 13: TTFT against network bandwidth",
    setting="8 prefill and 8 decode machines, the trace at its own speed, nobody rejected; only the NIC is changed.",
    runs=runs,
    finding=finding,
)
