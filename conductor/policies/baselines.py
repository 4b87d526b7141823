"""Baseline placement policies for comparison. Prefixes are not fetched: an instance re-uses only its own prefix.

`Random` and `LocalCacheAware` are baselines of FAST'25, figure 5.
"""

from __future__ import annotations

from conductor.draws import digest64, draws
from conductor.policies.base import Offers, Prompt, Weighed, predict_unfetched

# Multiple of the mean queue above which a session moves to another instance, if there is one below. It bounds the
# longest queue even if many prompts look like one session. With a lower value sessions would move at every burst.
_OVERLOAD = 1.25


class _Baseline:
    balancing_threshold: float | None = None
    by_session = False


class Random(_Baseline):
    """Chooses each instance with equal probability, as a function of the request's id and a seed.

    No generator state is kept: the same request gets the same draw again. If it is placed again without the instance
    that failed, each of the others has an equal chance.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        drawn = draws(offers.identity, digest64(prompt.request_id, self._seed))
        return predict_unfetched(prompt, offers).by(drawn)


class RoundRobin(_Baseline):
    """Chooses the least recently chosen instance, regardless of queues and prefixes."""

    name = "round-robin"

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        return predict_unfetched(prompt, offers).by(offers.chosen_at)


class LeastLoaded(_Baseline):
    """Chooses the instance with the shortest queue."""

    name = "least-loaded"

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        return predict_unfetched(prompt, offers).by(offers.queue_s)


class LocalCacheAware(_Baseline):
    """Algorithm 1 without fetching: chooses the smallest predicted TTFT. Shows the benefit of moving prefixes.

    An instance re-uses its device cache and its home store node.
    """

    name = "local-cache-aware"

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        return predict_unfetched(prompt, offers)


class SessionAffinity(_Baseline):
    """Sends the requests of one conversation to one instance, which then has their prefix.

    A session is `Place.session_id`, or the block that distinguishes the prompt's chain from others. By
    highest-random-weight hashing, every session ranks all instances in its own order and takes the first one that is
    not overloaded. So a session stays while its instance lives and keeps up, and returns when it keeps up again. An
    instance that joins or leaves moves only the sessions that it wins or had. No state is kept. Hashing with a load
    limit is due to Mirrokni, Thorup and Zadimoghaddam (2018).
    """

    name = "session-affinity"
    by_session = True

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        rank = draws(offers.identity, digest64(prompt.session or prompt.request_id))
        # Queues may differ by a prompt's own time at any moment, even if all instances are nearly idle.
        bound_s = _OVERLOAD * offers.queue_s.mean() + offers.prefill_s(prompt, 0)
        overloaded = offers.queue_s > bound_s
        return predict_unfetched(prompt, offers).by(rank + overloaded)
