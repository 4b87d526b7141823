"""The training schedule as pure functions of progress, the elapsed share of the time budget.

Time, not a step count, is the budget: the run ends on time on any machine, and the learning rate reaches its floor
whatever the speed was.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Shape of the run. Shares are of the whole time budget, from 0 to 1."""

    peak_learning_rate: float = 2e-3
    final_learning_rate: float = 5e-5
    warm_up_share: float = 0.02
    long_share: float = 0.1
    short_sequence_length: int = 512
    long_sequence_length: int = 2048
    tokens_per_step: int = 4096

    def learning_rate(self, progress: float) -> float:
        """Linear warm-up, then a cosine from the peak to the final rate (Loshchilov 2016)."""
        if progress < self.warm_up_share:
            return self.peak_learning_rate * progress / self.warm_up_share
        decay = min(1.0, (progress - self.warm_up_share) / (1.0 - self.warm_up_share))
        span = self.peak_learning_rate - self.final_learning_rate
        return self.final_learning_rate + span * 0.5 * (1.0 + math.cos(math.pi * decay))

    def sequence_length(self, progress: float) -> int:
        """Tokens per sequence; the last `long_share` of the run trains on long sequences."""
        is_long = progress >= 1.0 - self.long_share
        return self.long_sequence_length if is_long else self.short_sequence_length

    def batch_size(self, progress: float) -> int:
        """Sequences per step; the tokens per step stay the same."""
        return self.tokens_per_step // self.sequence_length(progress)
