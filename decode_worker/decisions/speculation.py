"""Speculative decoding by prompt lookup: the tokens that a sequence drafts, and how many are worth a row of a step.

A draft guesses the tokens behind a sequence's last one. A step computes a row for each, and samples a token after every
row exactly as if the tokens had come one by one. Draft tokens are accepted up to the first one that the sampler did not
choose. So drafts change how many tokens a step gives, never which.

Pure. Does not know blocks, steps or requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonserve.protocol.step_time import DecodeProfile

# Weight of one observation in `PromptLookup.rate`. Repetition begins and ends within a few tokens, so the last dozen
# tokens count.
RATE_WEIGHT = 0.2
# Tokens between two lookups of a sequence that drafts nothing. Its last guesses are compared with all of them, so the
# rate rises as fast, and lookups take less than 1 % of a step of the demo model.
LOOKUP_EVERY = 4
# Largest share of a lone sequence's step that a row is taken to cost. Native kernels were measured at 0.2 to 0.45. A
# profile measured on a busy machine may say 1, with which no draft would ever pay.
MOST_ROW_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Settings of speculative decoding, fixed for the life of the process."""

    num_tokens: int  # most tokens in a draft
    lookup_max: int  # longest end of a sequence that is looked up, in tokens
    lookup_min: int  # shortest
    max_rows: int  # rows of a step with drafts, up to which rows have the same bits in every step
    costs: DecodeProfile | None  # measured times of decode steps; None: every draft has `num_tokens`


class PromptLookup:
    """Drafts of one sequence, and how often they proved right.

    A draft is what followed the latest earlier occurrence of the sequence's end. The longest end wins. Every draft is
    compared with the tokens that follow, also where no row was spent on it. So the rate is known before a row is.
    """

    __slots__ = ("_draft", "_tokens", "num_seen", "rate")

    def __init__(self) -> None:
        self.rate = 0.0
        """Share of recently guessed tokens that were right, given that the tokens before them were."""
        self._tokens = np.empty(0, dtype=np.int32)  # with room for more
        self.num_seen = 0  # tokens at the last lookup
        self._draft: list[int] = []  # not compared yet

    def draft(self, token_ids: Sequence[int], settings: Speculation) -> list[int]:
        """Returns `settings.num_tokens` guesses of the tokens after `token_ids`, or none. `token_ids` begins with the
        tokens of the call before."""
        self._compare(token_ids)
        self._append(token_ids)
        tokens = self._tokens[: self.num_seen]
        following = _after_latest_match(tokens, settings.lookup_max, settings.lookup_min)
        # A match that overlaps the end repeats with its distance, as in LZ77.
        self._draft = [] if following is None else np.resize(tokens[following:], settings.num_tokens).tolist()
        return self._draft

    def _compare(self, token_ids: Sequence[int]) -> None:
        for guess, token in zip(self._draft, token_ids[self.num_seen :], strict=False):
            self.rate += RATE_WEIGHT * ((guess == token) - self.rate)
            if guess != token:
                break

    def _append(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * len(token_ids))
        self._tokens[self.num_seen : len(token_ids)] = token_ids[self.num_seen :]
        self.num_seen = len(token_ids)


def _after_latest_match(tokens: npt.NDArray[np.int32], longest: int, shortest: int) -> int | None:
    """Returns the position after the latest earlier occurrence of the longest end of `tokens` that has one; None if no
    end of at least `shortest` tokens has."""
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    found: int | None = None
    for length in range(1, longest + 1):
        if length > 1:
            ends = ends[ends >= length - 1]
            ends = ends[tokens[ends - (length - 1)] == tokens[-length]]
        if not len(ends):
            break
        if length >= shortest:
            found = int(ends[-1]) + 1
    return found


class StepTokens:
    """Expected tokens and time of one step, while drafts are added to it.

    Cost model: a row costs c1 + c2 · context seconds of the `DecodeProfile`. The rest of a step, c0, is reading the
    weights, which all rows share. Draft token i of a sequence gives a token with probability rate^i. It is added while
    that probability per second of its row exceeds the step's expected tokens per second. So a lone sequence drafts
    though half of its guesses are wrong. A large batch, whose steps consist of rows, drafts if nearly all are right.
    """

    def __init__(self, costs: DecodeProfile | None, num_seqs: int, context_tokens: int) -> None:
        self._costs = costs
        self._tokens = float(num_seqs)
        self._seconds = 0.0 if costs is None else costs.step_s(num_seqs, context_tokens)

    def add(self, rate: float, context_tokens: int, most: int) -> int:
        """Adds the draft of a sequence and returns its length, at most `most`."""
        gain = rate
        for count in range(most):
            if not self.pays(gain, context_tokens):
                return count
            self._tokens += gain
            self._seconds += self._row_s(context_tokens)
            gain *= rate
        return most

    def pays(self, probability: float, context_tokens: int) -> bool:
        """Returns True if a row that gives a token with this probability is worth its time."""
        return self._costs is None or probability * self._seconds > self._row_s(context_tokens) * self._tokens

    def _row_s(self, context_tokens: int) -> float:
        if self._costs is None:
            return 0.0
        alone_s = self._costs.step_s(1, context_tokens)
        return min(alone_s - self._costs.c0, MOST_ROW_SHARE * alone_s)
