"""Whose predictions turn a request away, why, and when it may come back. Pure.

A request's load on an instance pair is the larger of predicted TTFT ÷ its target and predicted TBT ÷ its target; it is
rejected above 1 (arXiv 2407.00079, §7.2). The TTFT is that of its prefill instance now. The TBT is either that of the
decode load now (`current`), which makes prefill and decode load swing in anti-phase since a prompt lands seconds later,
or that of the load when this prompt is prefilled (`predicted`), with as many as overtake it in all but one of six cases
(`CAUTION`). `none` rejects nobody for load.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import zip_longest

import numpy as np

from conductor.columns import DecodeTable, Floats
from conductor.decision import DecodeColumns, PrefillColumns, Rejection
from conductor.landing import Newcomer
from conductor.outlook import INSTANTS, Outlook

TTFT_SLO = "ttft_slo"
# Reasons that time takes care of.
FOR_LOAD = frozenset({"landing_blocks", TTFT_SLO, "tbt_slo"})
# There would be room, but a tenant that has had less than its share waits for it.
TENANT_SHARE = "tenant_share"
REASONS = FOR_LOAD | {"ttft_slo_unreachable", "tbt_slo_unreachable", TENANT_SHARE}
# Of the TBT target, what steps may take. A request's TBT is the mean of its longest tenth of gaps (FAST'25, §5.2), and
# one of these is that in which it joins, half a step longer in the mean: of 100 tokens that makes 5 %.
STEP_SHARE = 0.95
# Standard deviations of what overtakes a prompt that are added to its mean. By the mean alone every other prompt lands
# where it makes steps too long: admission keeps the load at its edge. docs/reproduction.md has what it is worth.
CAUTION = 1.0
# There would be room, but it is kept for those who were told to come back about now (`conductor.returns`).
RETURNS_FIRST = "returns_first"
# A client that comes back sooner finds the same queues.
MIN_RETRY_AFTER_S = 0.1


class Admission(StrEnum):
    """Whose predictions may reject."""

    NONE = "none"
    CURRENT = "current"
    PREDICTED = "predicted"


def caution(admission: Admission) -> float:
    """Standard deviations of what overtakes that a prediction of the decode load counts with."""
    return CAUTION if admission is Admission.PREDICTED else 0.0


def judged_tbt_s(admission: Admission, columns: DecodeColumns) -> Floats:
    """The time between tokens that is held against the target."""
    return columns.tbt_s if admission is Admission.CURRENT else columns.landing_tbt_s


def reject_ttft(columns: PrefillColumns, chosen_ttft_s: float, ttft_s: float, slo_s: float) -> Rejection:
    """`ttft_s` is the chosen instance's `chosen_ttft_s` and what landing blocks add to it."""
    if chosen_ttft_s <= slo_s:  # the landing blocks are what takes too long
        return Rejection(reason="landing_blocks", retry_after_s=_at_least(ttft_s - slo_s))
    # Queues drain by one second per second, so an instance meets the SLO once its excess is worked off.
    drains = (columns.ttft_s - slo_s)[columns.ttft_s - columns.queue_s <= slo_s]
    if drains.size:
        return Rejection(reason=TTFT_SLO, retry_after_s=_at_least(float(drains.min())))
    # Even an idle instance is too slow. Blocks cached until then may change that.
    return Rejection(reason="ttft_slo_unreachable", retry_after_s=_at_least(chosen_ttft_s))


def reject_tbt(
    decodes: DecodeTable,
    outlook: Outlook,
    newcomer: Newcomer,
    slo_s: float,
    since: float,
    queue_s: float,
) -> Rejection:
    """Retry once it would land on an instance within the target. The instant `since` that was judged is too early; who
    comes later lands later only by what exceeds the seconds that it would have waited in the queue of its prefill."""
    alone = decodes.step_s(np.ones(len(decodes)), np.full(len(decodes), float(newcomer.num_prompt_tokens)))
    if alone.min() > STEP_SHARE * slo_s:
        return Rejection(reason="tbt_slo_unreachable", retry_after_s=_at_least(float(alone.min())))
    too_early_s = _falls_to(STEP_SHARE * slo_s, _least_steps_s(decodes, outlook, newcomer, since))
    return Rejection(reason="tbt_slo", retry_after_s=_at_least(queue_s + too_early_s))


def reject_claimed(until: float | None, now: float) -> Rejection | None:
    """`until`: a tenant with less in flight was rejected, and told to come back about then; None: nobody was."""
    if until is None:
        return None
    return Rejection(reason=TENANT_SHARE, retry_after_s=_at_least(until - now))


def _least_steps_s(decodes: DecodeTable, outlook: Outlook, newcomer: Newcomer, since: float) -> Floats:
    """With the newcomer, if it lands at each of INSTANTS after `since`."""
    instants, prompt = (since + INSTANTS).tolist(), float(newcomer.num_prompt_tokens)
    steps_s: list[float] = []
    for pair in zip_longest(instants[::2], instants[1::2], fillvalue=since):
        steps = outlook.weigh(
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
    """Seconds until a line through these steps at INSTANTS is at the target; the last instant where it never is."""
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
