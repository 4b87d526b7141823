"""Published and baseline policies: Algorithm 1 of the Mooncake paper (GlobalCacheAware, FAST'25), its baselines of
figure 5 (Random, LocalCacheAware), and others.
"""

import numpy as np

from moonserve.conductor.placement.policies.base import PrefillCandidates, Prompt, Scores, predict, predict_unfetched
from moonserve.conductor.prediction.instance_table import digest64, uniform
from moonserve.protocol.errors import ConfigError

# The paper tunes it by hand and does not publish it. Fetching beats recomputing wherever the network is faster than the
# break-even bandwidth (6 GB/s on A800, far less on a CPU), which suggests 1. With a small margin above 1, an instance
# that lacks a block or two of a long prefix does not make another copy and load the holder's link for it.
DEFAULT_BALANCING_THRESHOLD = 1.25


class GlobalCacheAware:
    """Algorithm 1: the smallest predicted TTFT over all instances, with prefixes fetched where that pays off.

    If the best prefix in the cluster is more than `balancing_threshold` times as long as an instance's own, the
    instance fetches the missing blocks; otherwise it recomputes them. Fetching also replicates hot blocks: once queues
    build up at the holder of a shared prefix, another instance is chosen and takes a copy.
    """

    name = "global-cache-aware"
    by_session = False

    def __init__(self, balancing_threshold: float = DEFAULT_BALANCING_THRESHOLD) -> None:
        """Raises ConfigError for a threshold below 1, which would fetch what is already there."""
        if not balancing_threshold >= 1.0:
            raise ConfigError(f"--balancing-threshold is {balancing_threshold}; it must be at least 1")
        self.balancing_threshold: float | None = balancing_threshold
        self._threshold = balancing_threshold

    def weigh(self, prompt: Prompt, offers: PrefillCandidates) -> Scores:
        best, own = prompt.best_blocks, offers.prefix_blocks
        # best / own > threshold, also for own = 0.
        fetches = own * self._threshold < best
        return predict(prompt, offers, np.where(fetches, best, own))


# Multiple of the mean queue above which a session moves to another instance, if there is one below. It bounds the
# longest queue even if many prompts look like one session. With a lower value sessions would move at every burst.
_OVERLOAD = 1.25


class _Baseline:
    """Policies for comparison. Prefixes are not fetched: an instance re-uses only its own prefix."""

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

    def weigh(self, prompt: Prompt, offers: PrefillCandidates) -> Scores:
        drawn = uniform(offers.identity, digest64(prompt.request_id, self._seed))
        return predict_unfetched(prompt, offers).with_score(drawn)


class RoundRobin(_Baseline):
    """Chooses the least recently chosen instance, regardless of queues and prefixes."""

    name = "round-robin"

    def weigh(self, prompt: Prompt, offers: PrefillCandidates) -> Scores:
        return predict_unfetched(prompt, offers).with_score(offers.chosen_at)


class LeastLoaded(_Baseline):
    """Chooses the instance with the shortest queue."""

    name = "least-loaded"

    def weigh(self, prompt: Prompt, offers: PrefillCandidates) -> Scores:
        return predict_unfetched(prompt, offers).with_score(offers.queue_s)


class LocalCacheAware(_Baseline):
    """Algorithm 1 without fetching: chooses the smallest predicted TTFT. Shows the benefit of moving prefixes.

    An instance re-uses its device cache and its home store node.
    """

    name = "local-cache-aware"

    def weigh(self, prompt: Prompt, offers: PrefillCandidates) -> Scores:
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

    def weigh(self, prompt: Prompt, offers: PrefillCandidates) -> Scores:
        rank = uniform(offers.identity, digest64(prompt.session or prompt.request_id))
        # Queues may differ by a prompt's own time at any moment, even if all instances are nearly idle.
        bound_s = _OVERLOAD * offers.queue_s.mean() + offers.prefill_s(prompt, 0)
        overloaded = offers.queue_s > bound_s
        return predict_unfetched(prompt, offers).with_score(rank + overloaded)
