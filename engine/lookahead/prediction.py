"""How much longer running requests go on, and how many blocks they will hold at once, steps ahead. Pure.

`Predictor` is what `protocol.length_curve` learned, for many requests at once: by tenant or length of prompt, whichever
is the most particular that rests on enough requests. All is bounded by a request's own limit. Its rule: what is not
known is not guessed at: before enough requests have ended, a request is taken to use up its limit.

`outlook` sums that up: mean, spread, and the most that can be. Every step gives every request a token until it ends,
and those who end give all of theirs back: a sum of independent holdings, each there with the probability that its
request still runs (as the past-future scheduler of LightLLM has it, ASPLOS 2025, with quantiles of a sum where that
draws samples). Does not know who may come later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.lookahead.base import Growing, num_generated
from protocol.length_curve import EDGES, TAIL, LengthCurve, OutputLengths

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LEAST = 10  # ended requests, beside those who run


class Predictor:
    """Learns from every request that ended."""

    def __init__(self) -> None:
        self._lengths = OutputLengths()

    def ended(self, request: Growing, *, stopped: bool) -> None:
        """It generated its last token by itself, or was `stopped` by its limit."""
        generated = max(num_generated(request), 1)
        self._lengths.observe(
            generated,
            max_tokens=generated if stopped else generated + 1,
            prompt_tokens=request.num_prompt_tokens,
            tenant=request.tenant,
        )

    def curve(self, request: Growing) -> LengthCurve | None:
        """What is known of such requests; None: not enough."""
        curve = self._lengths.curve(prompt_tokens=request.num_prompt_tokens, tenant=request.tenant)
        return curve if curve.num_observed >= LEAST else None

    def alive(self, requests: Sequence[Growing], steps: Ints) -> Floats:
        """P(request still runs after so many more tokens), of [requests, steps]."""
        generated = np.array([num_generated(each) for each in requests], np.int64)
        limits = np.array([each.max_tokens for each in requests], np.int64)
        lengths = generated[:, None] + steps
        found = np.ones(lengths.shape)
        for curve, rows in self._by_curve(requests):
            found[rows] = _given(curve, generated[rows], lengths[rows])
        return np.where(lengths < limits[:, None], found, 0.0)

    def _by_curve(self, requests: Sequence[Growing]) -> list[tuple[LengthCurve, list[int]]]:
        groups: dict[int, tuple[LengthCurve, list[int]]] = {}
        for row, request in enumerate(requests):
            curve = self.curve(request)
            if curve is not None:
                groups.setdefault(id(curve), (curve, []))[1].append(row)
        return list(groups.values())

    def validate(self) -> None:
        self._lengths.validate()


def _given(curve: LengthCurve, generated: Ints, lengths: Ints) -> Floats:
    """P(length > lengths | length > generated)."""
    survival = curve.survival_beside(generated)
    alive = np.interp(generated, EDGES, survival)[:, None]
    seen = np.interp(lengths, EDGES, survival) / np.where(alive > 0.0, alive, 1.0)
    start = np.maximum(generated, 1)[:, None]  # longer than all that was seen
    unseen: Floats = (start / np.maximum(lengths, start)) ** TAIL
    return np.where(alive > 0.0, seen, unseen)


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
