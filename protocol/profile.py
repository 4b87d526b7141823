"""Cost formulae of prefill and decode steps with measured coefficients. Pure arithmetic.

Workers measure and register the coefficients. The conductor predicts with them, prefill workers compare loading a
prefix with computing it, and the simulator runs on them. The defaults describe a small model on one CPU core and apply
until a worker has measured: about 1,000 prompt tokens per second, 20 ms for a decode step of one sequence. The module
does not know queues, transfers, instances or policies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocol.errors import InvalidRequest


def _require_usable(*coefficients: float) -> None:
    """Raises InvalidRequest for coefficients with which the choice of the best instance would be wrong."""
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
        """Returns true if adding the rest of a prompt to a step that completes other prompts costs less waiting in all.

        The addition delays `num_delayed` first tokens. It saves `num_waiting` prompts, including this one, the constant
        c0 of a separate step."""
        added_s = self.seconds(num_tokens, num_cached) - self.c0
        return num_delayed * added_s <= num_waiting * self.c0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeProfile:
    """t(b, c) = c0 + c1·b + c2·c seconds per step of b sequences with c tokens of context in total."""

    c0: float
    c1: float
    c2: float

    def __post_init__(self) -> None:
        _require_usable(self.c0, self.c1, self.c2)

    def step_s(self, num_seqs: float, context_tokens: float) -> float:
        return self.c0 + self.c1 * num_seqs + self.c2 * context_tokens

    def batch_step_s(self, num_seqs: int, context_tokens: int, max_num_seqs: int) -> float:
        """Returns `step_s` of a batch of at most `max_num_seqs` sequences (0 = unlimited); the others wait."""
        if 0 < max_num_seqs < num_seqs:
            return self.step_s(max_num_seqs, context_tokens * max_num_seqs / num_seqs)
        return self.step_s(num_seqs, context_tokens)


DEFAULT_PREFILL = PrefillProfile(c0=0.005, c1=1e-3, c2=1e-8)
DEFAULT_DECODE = DecodeProfile(c0=0.015, c1=0.003, c2=2e-6)
