"""How long a decode step takes: t(b, c) = c0 + c1·b + c2·c, fitted offline, corrected by observed steps.

b sequences read c tokens of KV in all; the step is the time between their tokens (TBT). Pure; knows no instance and
not who joins next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from conductor.cost.correction import Correction
from conductor.cost.residuals import ErrorReport, Floats, report_errors
from protocol.fitting import fit_relative
from protocol.profile import DecodeProfile

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFit:
    profile: DecodeProfile
    # Of the points it was fitted to; `at` is (sequences, context tokens in all).
    errors: ErrorReport


def fit_decode(num_seqs: Counts, context_tokens: Counts, seconds: Floats) -> DecodeFit:
    """All of shape [points]. Raises InvalidRequest for no points, and for times that are not above zero."""
    num_seqs, context_tokens = np.asarray(num_seqs, np.int64), np.asarray(context_tokens, np.int64)
    seconds = np.asarray(seconds, float)
    columns = _columns(num_seqs, context_tokens)
    c0, c1, c2 = (float(c) for c in fit_relative(columns, seconds))
    at = list(zip(num_seqs.tolist(), context_tokens.tolist(), strict=True))
    return DecodeFit(
        profile=DecodeProfile(c0=c0, c1=c1, c2=c2),
        errors=report_errors(at, seconds, columns @ np.array((c0, c1, c2))),
    )


def _columns(num_seqs: Counts, context_tokens: Counts) -> Floats:
    return np.stack(np.broadcast_arrays(1.0, num_seqs, context_tokens), axis=-1).astype(float)


class DecodeCost:
    """One instance's formula and how far off it is now."""

    def __init__(self, profile: DecodeProfile) -> None:
        self.profile = profile
        self.correction = Correction()

    def step_s(self, num_seqs: float, context_tokens: float) -> float:
        return self.correction.factor * self.profile.step_s(num_seqs, context_tokens)

    @property
    def current(self) -> DecodeProfile:
        """The formula as it holds now."""
        factor, profile = self.correction.factor, self.profile
        return DecodeProfile(c0=factor * profile.c0, c1=factor * profile.c1, c2=factor * profile.c2)

    def observe(self, num_seqs: float, context_tokens: float, seconds: float) -> None:
        """A step took `seconds`; or means of several, since the formula is linear. Impossible reports are ignored."""
        if 0 < num_seqs < math.inf and 0 <= context_tokens < math.inf:
            self.correction.observe(self.profile.step_s(num_seqs, context_tokens), seconds)

    def validate(self) -> None:
        self.correction.validate()
