"""Size of the prompt chunks that a decode step can take within the TBT objective. Pure arithmetic.

A step with a chunk is assumed to take the time of the decode step plus that of the chunk; savings of a kernel that does
both at once are not counted. Worker, conductor and simulator share this module, so that predictions match execution. It
does not know which sequences decode, whose prompt is read, or what is cached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from protocol.errors import InvalidRequest
from protocol.profile import DecodeProfile, PrefillProfile

# A prompt advances by this many tokens even if decoding alone exhausts the budget, so that sequences that join later
# cannot starve it. On eight A800 (traces.simulator.profiles), 16 tokens after a context of 12,000 take 2 ms.
LEAST_CHUNK = 16

# Share of the TBT objective that a step with chunks may take. A joining sequence waits for the running step and then
# for its own. With one half, both together meet the objective; in a short answer such a gap determines the TBT
# (docs/conditional-disaggregation.md compares other shares).
CHUNK_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """Time budget of a step with chunks. `most_step_s` is its limit in seconds; the profiles are the worker's."""

    decode: DecodeProfile
    prefill: PrefillProfile
    most_step_s: float

    def __post_init__(self) -> None:
        if not 0.0 < self.most_step_s < math.inf:
            raise InvalidRequest(f"a step of at most {self.most_step_s} s is none")

    def slowed(self, factor: float) -> StepBudget:
        """Returns the budget for a worker whose steps take `factor` times as long as its profiles predict."""
        return self if factor == 1.0 else replace(self, most_step_s=self.most_step_s / factor)

    def step_s(self, num_seqs: int, context_tokens: int, chunks: Iterable[tuple[int, int]]) -> float:
        """Returns the predicted time of a step. `chunks` holds (tokens done, tokens to compute) of each prompt."""
        decode_s = self.decode.step_s(num_seqs, context_tokens) if num_seqs else 0.0
        return decode_s + sum(self.prefill.seconds(done + n, done) for done, n in chunks)

    def chunks(self, num_seqs: int, context_tokens: int, prompts: Iterable[tuple[int, int]], most: int) -> list[int]:
        """Returns the chunk sizes of the leading `prompts` in a step in which `num_seqs` sequences decode.

        `prompts` holds (tokens done, tokens missing); `most` limits the sum of the chunks. The next prompt only joins
        if the rest of the one before fits completely."""
        found: list[int] = []
        spent_s = self.decode.step_s(num_seqs, context_tokens) if num_seqs else 0.0
        for num_done, missing in prompts:
            if most <= 0:
                break
            limit = min(missing, most)
            if found:
                chunk = self._fitting(self.most_step_s - spent_s - self.prefill.c0, num_done, limit)
            else:
                chunk = self.chunk_tokens(spent_s, num_done, limit)
            if not chunk:
                break
            found.append(chunk)
            spent_s += self.prefill.seconds(num_done + chunk, num_done)
            most -= chunk
            if chunk < missing:
                break
        return found

    def chunk_tokens(self, spent_s: float, num_done: int, most: int) -> int:
        """Returns the size of a prompt's next chunk after `num_done` tokens, in a step that takes `spent_s` without it.

        The chunk fits the budget but has at least LEAST_CHUNK tokens, and at most `most`."""
        room_s = self.most_step_s - spent_s - self.prefill.c0
        return min(max(self._fitting(room_s, num_done, most), LEAST_CHUNK), most)

    def _fitting(self, room_s: float, num_done: int, most: int) -> int:
        """Returns the largest n ≤ `most` with c1·n + c2·((p + n)² − p²) ≤ `room_s`, for p = `num_done`."""
        linear = self.prefill.c1 + 2.0 * self.prefill.c2 * num_done
        square = self.prefill.c2
        if room_s <= 0.0:
            return 0
        if square * most * most + linear * most <= room_s:
            return most
        # This form of the root does not subtract two nearly equal numbers.
        root = math.sqrt(linear * linear + 4.0 * square * room_s)
        return min(int(2.0 * room_s / (linear + root)), most)
