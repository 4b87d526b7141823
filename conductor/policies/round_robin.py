"""Taking turns: the instance that was chosen longest ago. It looks at neither queues nor prefixes."""

from __future__ import annotations

from conductor.policies.base import Offers, Prompt, Weighed, predict_unfetched


class RoundRobin:
    """A baseline; an instance uses what prefix it happens to have."""

    name = "round-robin"
    balancing_threshold: float | None = None
    by_session = False

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        return predict_unfetched(prompt, offers).by(offers.chosen_at)
