"""How many tokens of a prompt fit into a decode step before those who decode wait too long for it. Pure arithmetic.

A step with a chunk takes as long as the decode step and the chunk one after the other: what a kernel that does both at
once saves is not counted. Worker, conductor and simulator all reckon with this file, so that what is promised is what
is done. What it does not know: who decodes, whose prompt it is, what is cached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from protocol.errors import InvalidRequest
from protocol.profile import DecodeProfile, PrefillProfile

# A prompt goes on by so many tokens although decoding alone takes all of the time: sequences that join later must not
# starve one that is being read. On eight A800 (traces.simulator.profiles) 16 tokens behind 12,000 take 2 ms.
LEAST_CHUNK = 16

# Of the TBT objective, what a step with chunks may take. A sequence that joins waits for the step under way and then
# for its own: with half, both together keep to the objective, and in a short answer such a gap is all that counts
# (docs/conditional-disaggregation.md has other shares).
CHUNK_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """`most_step_s`: seconds that a step with chunks may take; the profiles: what both parts take on this worker."""

    decode: DecodeProfile
    prefill: PrefillProfile
    most_step_s: float

    def __post_init__(self) -> None:
        if not 0.0 < self.most_step_s < math.inf:
            raise InvalidRequest(f"a step of at most {self.most_step_s} s is none")

    def slowed(self, factor: float) -> StepBudget:
        """For a worker whose steps take so many times as long as its profiles say."""
        return self if factor == 1.0 else replace(self, most_step_s=self.most_step_s / factor)

    def step_s(self, num_seqs: int, context_tokens: int, chunks: Iterable[tuple[int, int]]) -> float:
        """What a step takes, by the profiles; `chunks`: tokens that are there, and to compute, of each prompt."""
        decode_s = self.decode.step_s(num_seqs, context_tokens) if num_seqs else 0.0
        return decode_s + sum(self.prefill.seconds(done + n, done) for done, n in chunks)

    def chunks(self, num_seqs: int, context_tokens: int, prompts: Iterable[tuple[int, int]], most: int) -> list[int]:
        """Tokens of each of the leading `prompts` (tokens that are there, tokens that are missing) in a step in which
        `num_seqs` decode with so much context; `most` in all. A prompt whose rest fits lets the next one join."""
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
        """Tokens of the next chunk of a prompt of which `num_done` are there, in a step that takes `spent_s` without
        it: as many as keep to the budget, at most `most`, and never fewer than LEAST_CHUNK of them."""
        room_s = self.most_step_s - spent_s - self.prefill.c0
        return min(max(self._fitting(room_s, num_done, most), LEAST_CHUNK), most)

    def _fitting(self, room_s: float, num_done: int, most: int) -> int:
        """The largest n ≤ `most` with c1·n + c2·((p + n)² − p²) ≤ room, for p = `num_done`."""
        linear = self.prefill.c1 + 2.0 * self.prefill.c2 * num_done
        square = self.prefill.c2
        if room_s <= 0.0:
            return 0
        if square * most * most + linear * most <= room_s:
            return most
        # The form of the root that does not subtract two numbers that are nearly equal.
        root = math.sqrt(linear * linear + 4.0 * square * room_s)
        return min(int(2.0 * room_s / (linear + root)), most)
