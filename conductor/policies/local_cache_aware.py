"""Algorithm 1 without fetching: the smallest predicted TTFT, where every instance uses what it has by itself.

The baseline that shows what moving prefixes between hosts is worth (FAST'25, figure 5).
"""

from __future__ import annotations

from conductor.policies.base import Offers, Prompt, Weighed, predict_unfetched


class LocalCacheAware:
    """Predicted TTFT over all instances, each with its device cache and its home store node."""

    name = "local-cache-aware"
    balancing_threshold: float | None = None
    by_session = False

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        return predict_unfetched(prompt, offers)
