"""How long a decode step takes: t(b, c) = c0 + c1·b + c2·c, fitted offline, corrected by observed steps.

b sequences read c tokens of KV in all; the step is the time between their tokens (TBT). Pure; knows no instance and
not who joins next.
"""

from __future__ import annotations

import math

import numpy as np

from conductor.columns import Floats, Ints
from conductor.cost.correction import Correction
from conductor.cost.residuals import Fit, fit
from protocol.profile import DecodeProfile

DecodeFit = Fit[DecodeProfile]  # `at` is (sequences, context tokens in all)


def fit_decode(num_seqs: Ints, context_tokens: Ints, seconds: Floats) -> DecodeFit:
    """All of shape [points]. Raises InvalidRequest for no points, and for times that are not above zero."""
    b, c = np.asarray(num_seqs, np.int64), np.asarray(context_tokens, np.int64)
    return fit(DecodeProfile, (b, c), (np.ones(len(b)), b, c), seconds)


class DecodeCost:
    """One instance's formula and how far off it is now."""

    def __init__(self, profile: DecodeProfile) -> None:
        self.profile = profile
        self.correction = Correction()

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
