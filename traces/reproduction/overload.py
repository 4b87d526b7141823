"""The arXiv report's overload test: requests rejected by each kind of admission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from traces.reproduction.figure import Figure, Finding, Results, Row, Subject
from traces.reproduction.testbed import (
    MOONCAKE,
    dear_decoding,
    effective,
    pooled,
    rejected,
    wasted_device_s,
)
from traces.simulator.many import Work
from traces.simulator.results import SimulationResult

_SPEED = 2.0
_DEARER = 6.0  # factor on the published cost per sequence; with it the baseline rejects about the published share
_OF = 23_000
_PER = 1_000


@dataclass(frozen=True, slots=True)
class _Way:
    """A kind of admission."""

    name: str  # as in the report, or ours
    admission: str
    double_check: bool = False
    published: int | None = None  # number of rejected requests

    def run(self) -> Work:
        model = dear_decoding(_DEARER)
        return pooled(_SPEED, admission=self.admission, double_check=self.double_check, model=model)

    def rows(self, result: SimulationResult) -> tuple[Row, ...]:
        late = sum(each.reason == "tbt_slo_at_handoff" for each in result.outcomes)
        return (
            Row(
                f"rejected of {_PER:,}, {self.name}",
                rejected(result) * _PER,
                published=None if self.published is None else self.published / _OF * _PER,
                why="" if self.published is None else "another trace",
            ),
            Row(f"at the handoff, {self.name}", late / len(result.outcomes) * _PER),
            Row(
                f"prefill time for nothing, {self.name}",
                wasted_device_s(result) / result.counters["device_s"],
                unit="%",
            ),
            Row(f"effective, {self.name}", effective(result, MOONCAKE.tbt_slo_s), unit="%"),
        )


_BASELINE = _Way("baseline, when the prompt is computed", "late", published=4_183)
_EARLY = _Way("early, by the decode load now", "current", double_check=True, published=3_771)
_PREDICTIVE = _Way("early, by the predicted decode load", "predicted", double_check=True, published=3_589)
_UNCHECKED_EARLY = _Way("by the decode load now, unchecked", "current")
_UNCHECKED = _Way("by the predicted decode load, unchecked", "predicted")
_WAYS = (_BASELINE, _EARLY, _PREDICTIVE, _UNCHECKED_EARLY, _UNCHECKED)

_WHY = (
    "Another trace (23,000 requests) and other limits, which are not stated: only the order can be compared. By the"
    " published decode times eight decode machines are never short at twice the trace's speed; decoding is made so"
    " dear that the baseline rejects about the published share. In all three ways the decode machine looks again when"
    " the prompt is computed, as the report's local scheduler does, and steps may take 95 % of the target, since a"
    " request's longest tenth of gaps has the one in which it joins. The baseline computes a fifth or more of all"
    " prompts for nothing; its queues grow, and with them the time over which a load would have to be foreseen. What"
    " runs now is within the target wherever machines refuse, so that the load of now holds back few. The prediction"
    " counts what is under way and, as in all but one of six cases, those who will overtake: it rejects on arrival"
    " what others reject later, and is seldom corrected. Live machines do not look again: the last two ways, of which"
    " the load of now lets in far too many."
)


def runs(_subject: Subject) -> Mapping[str, Work]:
    return {way.name: way.run() for way in _WAYS}


def finding(_subject: Subject, results: Results) -> Finding:
    rows = [row for way in _WAYS for row in way.rows(results[way.name])]
    return Finding(rows=tuple(rows), claims=_claims(results), why=_WHY)


def _claims(results: Results) -> dict[str, bool]:
    baseline, early, predictive, _, _ = (rejected(results[way.name]) for way in _WAYS)
    kept = {way: effective(results[way.name], MOONCAKE.tbt_slo_s) for way in _WAYS}
    wasted = {way: wasted_device_s(results[way.name]) for way in _WAYS}
    return {
        "early rejects fewer than the baseline": early < baseline,
        "predictive rejects fewer than early": predictive < early,
        "predictive computes less than a tenth of the baseline's prompts for nothing": (
            wasted[_PREDICTIVE] < wasted[_BASELINE] / 10
        ),
        "predictive leaves most requests effective, and without the second look more than the other two": (
            kept[_PREDICTIVE] == max(kept.values()) and kept[_UNCHECKED] > max(kept[_BASELINE], kept[_EARLY])
        ),
    }


FIGURE = Figure(
    name="overload",
    title="Overload (arXiv 2407.00079)",
    setting=f"8 prefill and 8 decode machines, the trace at {_SPEED:g} times its speed, decoding {_DEARER:g} times as"
    " dear per sequence; rejection above 30 s of TTFT or 100 ms of TBT.",
    runs=runs,
    finding=finding,
)
