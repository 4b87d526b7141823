"""What a placement policy decides: how much prefix each prefill instance would re-use, and which instance is best.

Policies see numbers only (`Prompt`, `Offer`); they are stateless and deterministic. Ties between equal scores are
broken by the caller: least recently chosen first.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from conductor.decision import PrefillCandidate
from protocol.profile import PrefillProfile


class Prompt(NamedTuple):
    """What is to be prefilled."""

    num_tokens: int
    block_size: int
    best_blocks: int  # longest prefix in any store node


class Offer(NamedTuple):
    """One prefill instance's situation with regard to one prompt. Tuples: one per instance and request."""

    instance_id: str
    device_blocks: int
    prefix_blocks: int  # ≥ device_blocks: continued by the home store node
    queue_s: float
    local_s_per_block: float  # from the home store node
    remote_s_per_block: float  # from the best store node
    profile: PrefillProfile
    chosen_at: int


class PlacementPolicy(Protocol):
    """A way to choose the prefill instance."""

    @property
    def name(self) -> str: ...

    @property
    def balancing_threshold(self) -> float | None:
        """For the record of decisions; None where the policy has none."""

    def weigh(self, prompt: Prompt, offer: Offer) -> PrefillCandidate:
        """All terms of the prediction for one instance."""

    def score(self, candidate: PrefillCandidate) -> float:
        """The instance with the smallest score is chosen."""


def predict(prompt: Prompt, offer: Offer, reuse_blocks: int) -> PrefillCandidate:
    """The terms of running `prompt` on one instance with `reuse_blocks` leading blocks not computed."""
    prefix_blocks = offer.prefix_blocks
    load_s = (prefix_blocks - offer.device_blocks) * offer.local_s_per_block
    transfer_s = (reuse_blocks - prefix_blocks) * offer.remote_s_per_block
    prefill_s = offer.profile.seconds(prompt.num_tokens, reuse_blocks * prompt.block_size)
    return PrefillCandidate(
        offer.instance_id,
        offer.device_blocks,
        prefix_blocks,
        reuse_blocks,
        load_s,
        transfer_s,
        offer.queue_s,
        prefill_s,
        load_s + transfer_s + offer.queue_s + prefill_s,
        offer.chosen_at,
    )
