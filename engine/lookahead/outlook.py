"""How many blocks a set of requests will hold at once, steps ahead: mean, spread, and the most that can be.

Every step gives every request a token until it ends, and those who end give all of theirs back: a sum of independent
holdings, each there with the probability that its request still runs (as the past-future scheduler of LightLLM has it,
ASPLOS 2025, with quantiles of a sum where that draws samples). Pure arithmetic; does not know who may come later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.lookahead.base import Growing
from engine.lookahead.predictor import Floats, Ints, Predictor

_FURTHEST = 1 << 17


def _make_horizons() -> Ints:
    """Steps ahead: every one at first, then by halves of a doubling."""
    halves = np.round(2.0 ** (np.arange(2, 35) / 2)).astype(np.int64)
    return np.concatenate(([0, 1], halves[halves <= _FURTHEST]))


HORIZONS = _make_horizons()


@dataclass(frozen=True, slots=True)
class Outlook:
    """Blocks at each of HORIZONS (or the leading ones of them)."""

    mean: Floats
    variance: Floats
    most: Floats  # if nobody ends before its limit
    ends: Floats  # expected by then

    def peak(self, deviations: float) -> float:
        """Blocks that are not exceeded at any time, as far as so many standard deviations tell."""
        return float(np.minimum(self.mean + deviations * np.sqrt(self.variance), self.most).max())

    @property
    def steps_to_end(self) -> float:
        """Until one of them has ended, as is to be expected."""
        at = int(np.searchsorted(self.ends, 1.0))
        if at >= len(self.ends):
            return float(HORIZONS[-1])
        return float(HORIZONS[at] / self.ends[at])


def outlook(
    requests: Sequence[Growing],
    predictor: Predictor,
    block_size: int,
    shared: Sequence[int] | None = None,
) -> Outlook:
    """Of these requests, if no others come. `shared`: leading blocks of each that do not count, since others have them
    as well."""
    if not requests:
        nothing = np.zeros(len(HORIZONS))
        return Outlook(nothing, nothing, nothing, nothing)
    tokens = np.array([each.num_tokens for each in requests], np.int64)
    left = np.array([max(_left(each), 0) for each in requests], np.int64)
    blocks = -(-(tokens[:, None] + HORIZONS) // block_size)
    if shared is not None:
        blocks -= np.array(shared, np.int64)[:, None]
    alive = predictor.alive(requests, HORIZONS)
    alive[:, 0] = 1.0
    expected = alive * blocks
    return Outlook(
        mean=expected.sum(axis=0),
        variance=(expected * (1.0 - alive) * blocks).sum(axis=0),
        ends=(1.0 - alive).sum(axis=0),
        most=(blocks * (left[:, None] >= HORIZONS)).sum(axis=0, dtype=np.float64),
    )


def _left(request: Growing) -> int:
    return request.max_tokens - (request.num_tokens - request.num_prompt_tokens)
