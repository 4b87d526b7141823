"""Algorithm 1 of the Mooncake paper (FAST'25): the smallest predicted TTFT, with prefixes fetched where that pays off.

If the best prefix in the cluster is more than `balancing_threshold` times as long as an instance's own, the instance
fetches the missing blocks; otherwise it recomputes them. Fetching also replicates hot blocks: once queues build up at
the holder of a shared prefix, another instance is chosen and takes a copy.
"""

from __future__ import annotations

import numpy as np

from conductor.policies.base import Offers, Prompt, Weighed, predict
from protocol.errors import ConfigError

# The paper tunes it by hand and does not publish it. Fetching beats recomputing wherever the network is faster than the
# break-even bandwidth (6 GB/s on A800, far less on a CPU), which suggests 1. With a small margin above 1, an instance
# that lacks a block or two of a long prefix does not make another copy and load the holder's link for it.
DEFAULT_BALANCING_THRESHOLD = 1.25


class GlobalCacheAware:
    """Chooses the smallest predicted TTFT over all instances, fetching prefixes between hosts."""

    name = "global-cache-aware"
    by_session = False

    def __init__(self, balancing_threshold: float = DEFAULT_BALANCING_THRESHOLD) -> None:
        """Raises ConfigError for a threshold below 1, which would fetch what is already there."""
        if not balancing_threshold >= 1.0:
            raise ConfigError(f"--balancing-threshold is {balancing_threshold}; it is at least 1")
        self.balancing_threshold: float | None = balancing_threshold
        self._threshold = balancing_threshold

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        best, own = prompt.best_blocks, offers.prefix_blocks
        # best / own > threshold, also for own = 0.
        fetches = own * self._threshold < best
        return predict(prompt, offers, np.where(fetches, best, own))
