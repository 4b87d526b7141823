"""The arXiv report's overload test: how many requests each way of admitting turns away."""

from __future__ import annotations

from collections.abc import Mapping

from traces.reproduction.figure import Claim, Figure, Finding, Results, Row, Subject
from traces.reproduction.testbed import DEAR_DECODING, DEARER, MOONCAKE, effective, pooled, rejected
from traces.simulator.many import Work

_SPEED = 2.0
_OF = 23_000
_PUBLISHED = {  # the report's name → ours, requests that it rejected
    "baseline, when the prompt is computed": ("late", 4_183),
    "early, by the decode load now": ("current", 3_771),
    "early, by the predicted decode load": ("predicted", 3_589),
}
_WHY = (
    "Another trace (23,000 requests, which is not public) and other limits, which are not stated: so only the order"
    " can be compared, and shares instead of counts. By the published decode times eight decode machines are never"
    " short at this rate: eleven requests are rejected, all for TTFT, whoever decides. Hence sequences that cost"
    f" {DEARER:g} times as much in a decode step, as figure 15 asks for. The baseline computes prompts whose"
    " requests it then turns away, so there are fewer machine-seconds for the others. By the decode load now too"
    " many are turned away at the door while the load peaks, and too many let in while it is low: the swing in"
    " anti-phase that the report describes. By the load that is predicted for the moment at which the prompt lands,"
    " fewer."
)


def runs(_subject: Subject) -> Mapping[str, Work]:
    return {
        name: pooled(_SPEED, admission=admission, model=DEAR_DECODING)
        for name, (admission, _) in _PUBLISHED.items()
    }


def finding(_subject: Subject, results: Results) -> Finding:
    shares = {name: rejected(results[name]) for name in _PUBLISHED}
    rows = [
        Row(
            what=f"rejected, {name}",
            ours=shares[name],
            published=published / _OF,
            unit="%",
            why="another trace",
        )
        for name, (_, published) in _PUBLISHED.items()
    ]
    rows += [
        Row(what=f"effective, {name}", ours=effective(results[name], MOONCAKE.tbt_slo_s), unit="%")
        for name in _PUBLISHED
    ]
    baseline, early, predictive = shares.values()
    claim = Claim(text="predictive < early < baseline", holds=predictive < early < baseline)
    return Finding(rows=tuple(rows), claims=(claim,), why=_WHY)


FIGURE = Figure(
    name="overload",
    title="Overload (arXiv 2407.00079)",
    setting=f"8 prefill and 8 decode machines, the trace at {_SPEED:g} times its speed, decoding {DEARER:g} times as"
    " dear per sequence; rejection above 30 s of TTFT or 100 ms of TBT.",
    runs=runs,
    finding=finding,
)
