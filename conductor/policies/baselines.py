"""The simple policies that cache-aware ones are compared with. An instance uses the prefix that it has by itself.

`Random` and `LocalCacheAware` are baselines of FAST'25, figure 5.
"""

from __future__ import annotations

from conductor.draws import digest64, draws
from conductor.policies.base import Offers, Prompt, Weighed, predict_unfetched

# Multiple of the mean queue above which an instance takes no session that has another choice. It bounds the longest
# queue even when many prompts look like one session. With a lower value sessions would move at every burst.
_OVERLOAD = 1.25


class _Baseline:
    balancing_threshold: float | None = None
    by_session = False


class Random(_Baseline):
    """Any instance with equal probability, as a function of the request's id and a seed.

    There is no generator whose state would have to be kept: the same request gets the same draw again, and placing it
    again without the instance that failed gives each of the others an equal chance.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        drawn = draws(offers.identity, digest64(prompt.request_id, self._seed))
        return predict_unfetched(prompt, offers).by(drawn)


class RoundRobin(_Baseline):
    """The instance that was chosen longest ago. It looks at neither queues nor prefixes."""

    name = "round-robin"

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        return predict_unfetched(prompt, offers).by(offers.chosen_at)


class LeastLoaded(_Baseline):
    """The instance with the shortest queue."""

    name = "least-loaded"

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        return predict_unfetched(prompt, offers).by(offers.queue_s)


class LocalCacheAware(_Baseline):
    """Algorithm 1 without fetching: the smallest predicted TTFT. It shows what moving prefixes between hosts is worth.

    An instance counts its device cache and its home store node.
    """

    name = "local-cache-aware"

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        return predict_unfetched(prompt, offers)


class SessionAffinity(_Baseline):
    """The requests of one conversation go to one instance, which then has their prefix.

    A session is `Place.session_id`, or what distinguishes the prompt's chain from others. Highest-random-weight
    hashing: every session ranks all instances in an order of its own, and takes the first one that is not overloaded.
    So a session stays where it is while its instance lives and keeps up, comes back when it keeps up again, and an
    instance that joins or leaves moves only the sessions that it wins or had. Nothing is remembered. A cap on load
    beside such hashing is Mirrokni, Thorup and Zadimoghaddam's (2018).
    """

    name = "session-affinity"
    by_session = True

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        rank = draws(offers.identity, digest64(prompt.session or prompt.request_id))
        # A prompt's own time is what a queue may differ by at any moment, also when all are nearly idle.
        bound_s = _OVERLOAD * offers.queue_s.mean() + offers.prefill_s(prompt, 0)
        overloaded = offers.queue_s > bound_s
        return predict_unfetched(prompt, offers).by(rank + overloaded)
