"""What one sequence more is worth, in preemptions. Pure arithmetic over a worker's measured profiles.

Whoever is not admitted now waits for some others to end. Until then each step would have given a token more for the
same constant part of its time, `c0`; a preemption takes the time to compute a sequence's tokens again from all. So
long prompts, dear to compute again, call for caution, and short ones in small batches for little.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.profile import DecodeProfile, PrefillProfile

# Others that end before one that was refused is admitted. Tuned on synthetic traces (benchmarks.engine.lookahead): with
# 1 short prompts with long answers yield 2 % less at half of the preemptions, and long prompts do not mind.
_ENDS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    decode: DecodeProfile
    prefill: PrefillProfile

    def tolerable(self, num_seqs: int, tokens_each: float, steps: float) -> float:
        """Preemptions per admission at which it gains as much as it costs: beside `num_seqs` sequences of so many
        tokens each, of which the next is expected to end after `steps`.

        Gained: steps · c0 / step_s tokens. Lost: seconds of recomputation · num_seqs / step_s."""
        lost_s = self.prefill.seconds(round(tokens_each), 0) * num_seqs
        return _ENDS * steps * self.decode.c0 / lost_s if lost_s > 0.0 else 1.0
