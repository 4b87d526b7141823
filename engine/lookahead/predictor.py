"""How much longer running requests go on: what `protocol.output_length` learned, for many requests at once.

By model, and within one by tenant or length of prompt, whichever is the most particular that rests on enough requests.
All is bounded by a request's own limit. Its rule: what is not known is not guessed at: before enough requests have
ended, and for a model that nobody asked for yet, a request is taken to use up its limit. Pure; knows no blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.lookahead.base import Growing, num_generated
from protocol.length_curve import EDGES, TAIL, LengthCurve
from protocol.output_length import OutputLengths

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LEAST = 10  # ended requests, beside those who run
MOST_MODELS = 64  # one worker's; of some hundred KiB each when all of its tenants are known


class Predictor:
    """Learns from every request that ended."""

    def __init__(self) -> None:
        self._models: dict[str, OutputLengths] = {}  # least recently ended first

    def ended(self, request: Growing, *, stopped: bool) -> None:
        """It generated its last token by itself, or was `stopped` by its limit."""
        lengths = self._models.pop(request.model, None) or OutputLengths()
        self._models[request.model] = lengths
        if len(self._models) > MOST_MODELS:
            del self._models[next(iter(self._models))]
        generated = max(num_generated(request), 1)
        lengths.observe(
            generated,
            max_tokens=generated if stopped else generated + 1,
            prompt_tokens=request.num_prompt_tokens,
            tenant=request.tenant,
        )

    def curve(self, request: Growing) -> LengthCurve | None:
        """What is known of such requests; None: not enough."""
        lengths = self._models.get(request.model)
        if lengths is None:
            return None
        curve = lengths.curve(prompt_tokens=request.num_prompt_tokens, tenant=request.tenant)
        return curve if curve.num_observed >= LEAST else None

    def remaining(self, request: Growing, q: float) -> int:
        """Tokens after which it has ended with a probability of `q`, as far as its limit lets it."""
        generated = num_generated(request)
        curve = self.curve(request)
        if curve is None:
            return max(request.max_tokens - generated, 0)
        length = curve.quantile(q, generated=generated, max_tokens=request.max_tokens)
        return max(length - generated, 0)

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
        assert len(self._models) <= MOST_MODELS
        for lengths in self._models.values():
            lengths.validate()


def _given(curve: LengthCurve, generated: Ints, lengths: Ints) -> Floats:
    """P(length > lengths | length > generated)."""
    survival = curve.survival_beside(generated)
    alive = np.interp(generated, EDGES, survival)[:, None]
    seen = np.interp(lengths, EDGES, survival) / np.where(alive > 0.0, alive, 1.0)
    start = np.maximum(generated, 1)[:, None]  # longer than all that was seen
    unseen: Floats = (start / np.maximum(lengths, start)) ** TAIL
    return np.where(alive > 0.0, seen, unseen)
