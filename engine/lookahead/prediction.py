"""Predicts how long running requests continue, and how many blocks they will hold at each later step. Pure.

`Predictor` applies `protocol.length_curve` to many requests at once: by tenant or prompt length, whichever is the most
specific class with enough ended requests. Predictions are bounded by a request's own limit. Before enough requests have
ended there is no guess: a request is assumed to use up its limit.

`outlook` sums predictions up to mean, variance and maximum. Every step gives each request a token until it ends and
frees all its blocks. The total is a sum of independent holdings, each present with the probability that its request
still runs, as in LightLLM's past-future scheduler (ASPLOS 2025), but with quantiles of the sum instead of samples.
Later arrivals are not considered.
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

LEAST = 10  # ended requests that a prediction needs


class Predictor:
    """Learns output lengths from every request that ended."""

    def __init__(self) -> None:
        self._lengths = OutputLengths()

    def ended(self, request: Growing, *, stopped: bool) -> None:
        """Records the length of an ended request, which ended by itself or was `stopped` by its limit."""
        generated = max(num_generated(request), 1)
        self._lengths.observe(
            generated,
            max_tokens=generated if stopped else generated + 1,
            prompt_tokens=request.num_prompt_tokens,
            tenant=request.tenant,
        )

    def curve(self, request: Growing) -> LengthCurve | None:
        """Returns the length curve of similar requests, or None if too few have ended."""
        curve = self._lengths.curve(prompt_tokens=request.num_prompt_tokens, tenant=request.tenant)
        return curve if curve.num_observed >= LEAST else None

    def alive(self, requests: Sequence[Growing], steps: Ints) -> Floats:
        """Returns the probability [requests, steps] that each request still runs after each number of steps."""
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
    """Returns P(length > lengths | length > generated)."""
    survival = curve.survival_beside(generated)
    alive = np.interp(generated, EDGES, survival)[:, None]
    seen = np.interp(lengths, EDGES, survival) / np.where(alive > 0.0, alive, 1.0)
    start = np.maximum(generated, 1)[:, None]  # for requests longer than all that were observed
    unseen: Floats = (start / np.maximum(lengths, start)) ** TAIL
    return np.where(alive > 0.0, seen, unseen)


_FURTHEST = 1 << 17


def _make_horizons() -> Ints:
    """Returns numbers of steps ahead: 0, 1, then powers of √2."""
    halves = np.round(2.0 ** (np.arange(2, 35) / 2)).astype(np.int64)
    return np.concatenate(([0, 1], halves[halves <= _FURTHEST]))


HORIZONS = _make_horizons()


@dataclass(frozen=True, slots=True)
class Outlook:
    """Predicted number of blocks at each of HORIZONS."""

    mean: Floats
    variance: Floats
    most: Floats  # if no request ends before its limit
    ends: Floats  # requests expected to have ended

    def peak(self, deviations: float) -> float:
        """Returns the largest number of blocks at any time, with a margin of `deviations` standard deviations."""
        return float(np.minimum(self.mean + deviations * np.sqrt(self.variance), self.most).max())

    @property
    def steps_to_end(self) -> float:
        """Expected number of steps until one of the requests has ended."""
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
    """Returns the outlook of these requests without later arrivals. `shared`: number of leading blocks of each request
    that are not counted, since others hold them too."""
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
