"""Consistent choice by session: the requests of one conversation go to one instance, which then has their prefix.

Highest-random-weight hashing: every session ranks all instances in an order of its own, and takes the first one that is
not overloaded. So a session stays where it is while its instance lives and keeps up, comes back when it keeps up again,
and an instance that joins or leaves moves only the sessions that it wins or had. Nothing is remembered. A cap on load
beside such hashing is Mirrokni, Thorup and Zadimoghaddam's (2018).
"""

from __future__ import annotations

from conductor.draws import digest64, draws
from conductor.policies.base import Offers, Prompt, Weighed, predict_unfetched

# Times the mean queue, which bounds the busiest instance's also when many prompts look like one session. Nearer to the
# mean sessions would move at every burst.
_OVERLOAD = 1.25


class SessionAffinity:
    """By `Place.session_id`, or by what distinguishes the prompt's chain from others."""

    name = "session-affinity"
    balancing_threshold: float | None = None
    by_session = True

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        rank = draws(offers.identity, digest64(prompt.session or prompt.request_id))
        # A prompt's own time is what a queue may differ by at any moment, also when all are nearly idle.
        bound_s = _OVERLOAD * offers.queue_s.mean() + offers.prefill_s(prompt, 0)
        overloaded = offers.queue_s > bound_s
        return predict_unfetched(prompt, offers).by(rank + overloaded)
