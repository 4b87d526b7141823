"""Load balancing alone: the shortest queue wins, and an instance uses what prefix it has by itself."""

from __future__ import annotations

from conductor.policies.base import Offers, Prompt, Weighed, predict_unfetched


class LeastLoaded:
    """The baseline that cache-aware policies are compared with."""

    name = "least-loaded"
    balancing_threshold: float | None = None
    by_session = False

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        return predict_unfetched(prompt, offers).by(offers.queue_s)
