"""Admission: which predictions reject a request, for which reason, and when it may return. Pure.

A request's load on an instance pair is the larger of predicted TTFT ÷ its target and predicted TBT ÷ its target. It is
rejected above 1 (arXiv 2407.00079, §7.2). The TTFT is predicted for its prefill instance now. With `current`, the TBT
is predicted from the current decode load. That makes prefill and decode load swing in anti-phase, because a prompt
lands seconds later. With `predicted`, it is predicted from the load when this prompt is prefilled, with a number of
overtaking sequences that is not exceeded in five of six cases (`CAUTION`). `none` rejects no request for load.

`Limits` holds the objectives, times and sizes that the state is configured with.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest

import numpy as np

from moonserve.conductor.events import Place
from moonserve.conductor.placement.decision import DecodeColumns, PrefillColumns, Rejection
from moonserve.conductor.placement.decode_selection import NewSequence
from moonserve.conductor.prediction.decode_forecast import INSTANTS, DecodeForecast
from moonserve.conductor.prediction.instance_table import DecodeTable, Floats
from moonserve.protocol.step_time import CHUNK_SHARE

TTFT_SLO = "ttft_slo"
# Reasons that pass with time.
LOAD_REASONS = frozenset({"landing_blocks", TTFT_SLO, "tbt_slo"})
# There is room, but it is reserved for a rejected tenant with less service in flight.
TENANT_SHARE = "tenant_share"
REASONS = LOAD_REASONS | {"ttft_slo_unreachable", "tbt_slo_unreachable", TENANT_SHARE}
# Share of the TBT target that steps may take. A request's TBT is the mean of its longest tenth of gaps (FAST'25, §5.2).
# One of those gaps is the one in which it joins, longer by half a step in the mean: with 100 tokens that makes 5 %.
STEP_SHARE = 0.95
# Standard deviations added to the mean number of overtaking sequences. With the mean alone, every other prompt makes
# steps too long where it lands, because admission keeps the load at its limit. docs/reproduction.md has the effect.
CAUTION = 1.0
# There is room, but it is reserved for rejected requests that are due to return about now
# (`conductor.placement.retry_promises`).
RETURNS_FIRST = "returns_first"
# A client that retries sooner meets the same queues.
MIN_RETRY_AFTER_S = 0.1


class AdmissionMode(StrEnum):
    """Which predictions may reject a request."""

    NONE = "none"
    CURRENT = "current"
    PREDICTED = "predicted"


def overtaking_deviations(admission: AdmissionMode) -> float:
    """Returns the standard deviations to add to the mean number of overtaking sequences."""
    return CAUTION if admission is AdmissionMode.PREDICTED else 0.0


def judged_tbt_s(admission: AdmissionMode, columns: DecodeColumns) -> Floats:
    """Returns the predicted TBT that is compared with the target."""
    return columns.tbt_s if admission is AdmissionMode.CURRENT else columns.landing_tbt_s


def reject_ttft(columns: PrefillColumns, chosen_ttft_s: float, ttft_s: float, slo_s: float) -> Rejection:
    """Rejects a TTFT above `slo_s`. `ttft_s`: `chosen_ttft_s` plus the wait for landing blocks and the overhead."""
    if chosen_ttft_s <= slo_s:  # the added wait exceeds the target
        return Rejection(reason="landing_blocks", retry_after_s=_at_least(ttft_s - slo_s))
    # A queue drains by one second per second, so an instance meets the SLO once its excess has drained.
    drains = (columns.ttft_s - slo_s)[columns.ttft_s - columns.queue_s <= slo_s]
    if drains.size:
        return Rejection(reason=TTFT_SLO, retry_after_s=_at_least(float(drains.min())))
    # Even an idle instance is too slow, unless more blocks of the prompt are cached until the retry.
    return Rejection(reason="ttft_slo_unreachable", retry_after_s=_at_least(chosen_ttft_s))


def reject_tbt(
    decodes: DecodeTable,
    outlook: DecodeForecast,
    newcomer: NewSequence,
    slo_s: float,
    since: float,
    queue_s: float,
) -> Rejection:
    """Rejects a TBT above the target, until the request would land on an instance within it. The judged instant `since`
    is too early. A later request lands later only by its delay beyond `queue_s`, the wait of this one for prefill."""
    alone = decodes.step_s(np.ones(len(decodes)), np.full(len(decodes), float(newcomer.num_prompt_tokens)))
    if alone.min() > STEP_SHARE * slo_s:
        return Rejection(reason="tbt_slo_unreachable", retry_after_s=_at_least(float(alone.min())))
    too_early_s = _falls_to(STEP_SHARE * slo_s, _least_steps_s(decodes, outlook, newcomer, since))
    return Rejection(reason="tbt_slo", retry_after_s=_at_least(queue_s + too_early_s))


def reject_claimed(until: float | None, now: float) -> Rejection | None:
    """Rejects in favour of a claim. `until`: latest end of claims of tenants with less in flight; None = no claim."""
    return None if until is None else Rejection(reason=TENANT_SHARE, retry_after_s=_at_least(until - now))


def _least_steps_s(decodes: DecodeTable, outlook: DecodeForecast, newcomer: NewSequence, since: float) -> Floats:
    """Returns the shortest step of any instance with the newcomer landing at each of INSTANTS after `since`."""
    instants, prompt = (since + INSTANTS).tolist(), float(newcomer.num_prompt_tokens)
    steps_s: list[float] = []
    for pair in zip_longest(instants[::2], instants[1::2], fillvalue=since):
        steps = outlook.predict_steps(
            decodes,
            instants=(since, *pair),
            own_tokens=(prompt, prompt, prompt),
            num_overtaking=newcomer.num_overtaking,
            expected_output=0.0,
            needed_blocks=0,
            block_size=1,
        )
        steps_s += (float(steps.landing_tbt_s.min()), float(steps.later_tbt_s.min()))
    return np.array(steps_s[: len(instants)])


def _falls_to(slo_s: float, steps_s: Floats) -> float:
    """Returns the seconds until steps, interpolated between INSTANTS, meet the target; at most the last instant."""
    within = steps_s <= slo_s
    if not within.any():
        return float(INSTANTS[-1])
    first = int(within.argmax())
    if first == 0:
        return 0.0
    before, after = float(steps_s[first - 1]), float(steps_s[first])
    share = (before - slo_s) / (before - after)
    return float(INSTANTS[first - 1] + share * (INSTANTS[first] - INSTANTS[first - 1]))


def _at_least(seconds: float) -> float:
    return max(seconds, MIN_RETRY_AFTER_S)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the conductor; times in seconds. See `conductor.config` for their meaning and source."""

    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 1.0
    admission: AdmissionMode = AdmissionMode.PREDICTED
    lease_s: float = 5.0
    heartbeat_interval_s: float = 1.0
    placement_ttl_s: float = 900.0
    num_decisions: int = 4096
    decision_bytes: int = 64 * 2**20  # memory limit of decisions kept for explanation
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # default 1
    by_priority: bool = False  # queues are ordered by priority, as by the workers' --scheduling-policy
    conditional_disaggregation: bool = False  # decode workers prefill prompts themselves if that is sooner
    chunk_share: float = CHUNK_SHARE  # share of the TBT objective that a decode step with a chunk may take

    def objectives(self, place: Place) -> tuple[float, float]:
        """Returns the TTFT and TBT objectives of a request."""
        return (
            self.ttft_slo_s if place.ttft_slo_s is None else place.ttft_slo_s,
            self.tbt_slo_s if place.tbt_slo_s is None else place.tbt_slo_s,
        )
