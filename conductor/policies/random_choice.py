"""Chance: any instance with equal probability, as a function of the request's id and a seed.

There is no generator whose state would have to be kept: the same request gets the same draw again, and placing it
again without the instance that failed gives each of the others an equal chance.
"""

from __future__ import annotations

from conductor.draws import digest64, draws
from conductor.policies.base import Offers, Prompt, Weighed, predict_unfetched


class Random:
    """The simplest baseline (FAST'25, figure 5); an instance uses what prefix it happens to have."""

    name = "random"
    balancing_threshold: float | None = None
    by_session = False

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        drawn = draws(offers.identity, digest64(prompt.request_id, self._seed))
        return predict_unfetched(prompt, offers).by(drawn)
