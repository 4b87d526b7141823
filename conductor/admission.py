"""Turning a request away: why, and when it may come back. Pure.

A request is admitted when its predicted TTFT and TBT are within the SLO. Otherwise it is told when queues will have
drained, or sequences ended, enough for it.
"""

from __future__ import annotations

import numpy as np

from conductor.decision import DecodeColumns, PrefillColumns, Rejection
from conductor.members import Instance

# A client that comes back sooner finds the same queues.
MIN_RETRY_AFTER_S = 0.1


def reject_ttft(
    columns: PrefillColumns, chosen_ttft_s: float, ttft_s: float, slo_s: float
) -> Rejection:
    """`ttft_s` is the chosen instance's `chosen_ttft_s` and what landing blocks add to it."""
    if chosen_ttft_s <= slo_s:  # the landing blocks are what takes too long
        return Rejection(reason="landing_blocks", retry_after_s=_at_least(ttft_s - slo_s))
    # Queues drain by one second per second, so an instance meets the SLO once its excess is worked off.
    drains = (columns.ttft_s - slo_s)[columns.ttft_s - columns.queue_s <= slo_s]
    if drains.size:
        return Rejection(reason="ttft_slo", retry_after_s=_at_least(float(drains.min())))
    # Even an idle instance is too slow. Blocks cached until then may change that.
    return Rejection(reason="ttft_slo_unreachable", retry_after_s=_at_least(chosen_ttft_s))


def reject_tbt(
    instance: Instance, columns: DecodeColumns, row: int, slo_s: float, now: float
) -> Rejection:
    """Retry once enough sequences are expected to have ended for this one to fit within the SLO."""
    registration = instance.registration
    tbt_s = float(columns.tbt_s[row])
    drain = instance.decode.drain(tbt_s, now)
    if not len(drain.ends_s):  # sequences that another conductor placed
        return Rejection(reason="tbt_slo", retry_after_s=_at_least(tbt_s))
    ended = np.arange(1, len(drain.ends_s) + 1)
    num_seqs = np.maximum(columns.num_seqs[row] - ended, 1)
    context_tokens = np.maximum(columns.context_tokens[row] - drain.tokens.cumsum(), 0)
    running = np.minimum(num_seqs, registration.max_num_seqs or np.inf)
    profile = registration.decode_profile
    steps_s = profile.c0 + profile.c1 * running + profile.c2 * (context_tokens * running / num_seqs)
    fits = steps_s <= slo_s
    enough = int(fits.argmax()) if fits.any() else len(fits) - 1
    return Rejection(reason="tbt_slo", retry_after_s=_at_least(float(drain.ends_s[enough])))


def _at_least(seconds: float) -> float:
    return max(seconds, MIN_RETRY_AFTER_S)
