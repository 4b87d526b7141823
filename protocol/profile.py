"""How long a worker's own steps take: two small formulae with measured coefficients. Pure arithmetic.

Workers measure and register them; the conductor predicts from them, a prefill worker weighs reading against computing
with them, the simulator runs on them. The defaults describe a small model on one CPU core and only matter until a
worker has measured: about 1,000 prompt tokens per second, 20 ms for a decode step of one sequence. What this module
does not know: queues, transfers, instances, policies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocol.errors import InvalidRequest


def _require_usable(*coefficients: float) -> None:
    """A negative or infinite coefficient would turn the choice of the best instance upside down."""
    if not all(math.isfinite(c) and c >= 0 for c in coefficients):
        raise InvalidRequest(f"profile coefficients must be finite and not negative: {coefficients}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProfile:
    """t(n, p) = c0 + c1·(n−p) + c2·(n²−p²) seconds for n prompt tokens of which p are cached."""

    c0: float
    c1: float
    c2: float

    def __post_init__(self) -> None:
        _require_usable(self.c0, self.c1, self.c2)

    def seconds(self, num_tokens: int, num_cached: int) -> float:
        return (
            self.c0
            + self.c1 * (num_tokens - num_cached)
            + self.c2 * (num_tokens * num_tokens - num_cached * num_cached)
        )

    def joins(self, num_tokens: int, num_cached: int, *, num_delayed: int, num_waiting: int) -> bool:
        """Whether the rest of a prompt is computed in a step that others end with, rather than in one of its own: when
        that costs less waiting in all. `num_delayed` first tokens wait for it, and `num_waiting` prompts, this one
        included, come sooner by the constant of a step."""
        added_s = self.seconds(num_tokens, num_cached) - self.c0
        return num_delayed * added_s <= num_waiting * self.c0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeProfile:
    """t(b, c) = c0 + c1·b + c2·c seconds per step of b sequences that hold c tokens of context in all."""

    c0: float
    c1: float
    c2: float

    def __post_init__(self) -> None:
        _require_usable(self.c0, self.c1, self.c2)

    def step_s(self, num_seqs: float, context_tokens: float) -> float:
        return self.c0 + self.c1 * num_seqs + self.c2 * context_tokens

    def batch_step_s(self, num_seqs: int, context_tokens: int, max_num_seqs: int) -> float:
        """As `step_s`, where sequences beyond `max_num_seqs` (0 = unlimited) wait and are not part of the step."""
        if 0 < max_num_seqs < num_seqs:
            return self.step_s(max_num_seqs, context_tokens * max_num_seqs / num_seqs)
        return self.step_s(num_seqs, context_tokens)


DEFAULT_PREFILL = PrefillProfile(c0=0.005, c1=1e-3, c2=1e-8)
DEFAULT_DECODE = DecodeProfile(c0=0.015, c1=0.003, c2=2e-6)
