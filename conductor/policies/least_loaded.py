"""Load balancing alone: the shortest queue wins, and an instance uses what prefix it has by itself."""

from __future__ import annotations

from conductor.decision import PrefillCandidate
from conductor.policies.base import Offer, Prompt, predict


class LeastLoaded:
    """The baseline that cache-aware policies are compared with."""

    name = "least-loaded"
    balancing_threshold: float | None = None

    def weigh(self, prompt: Prompt, offer: Offer) -> PrefillCandidate:
        return predict(prompt, offer, offer.prefix_blocks)

    def score(self, candidate: PrefillCandidate) -> float:
        return candidate.queue_s
