"""How long a prompt computes: t(n, p) = c0 + c1·(n−p) + c2·(n²−p²), fitted offline, corrected by what is reported.

The polynomial is the paper's regression on length and prefix length (FAST'25, Algorithm 1, estimate_prefill); c2 is
attention, which grows with the square. Pure; knows no queue and no instance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from conductor.cost.residuals import ErrorReport, Floats, report_errors
from conductor.cost.tracking import Tracking
from protocol.fitting import fit_relative
from protocol.profile import PrefillProfile

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFit:
    profile: PrefillProfile
    errors: ErrorReport  # of the points it was fitted to; `at` is (tokens, cached)


def fit_prefill(num_tokens: Tokens, num_cached: Tokens, seconds: Floats) -> PrefillFit:
    """All of shape [points]. Raises InvalidRequest for no points, and for times that are not above zero."""
    num_tokens, num_cached = np.asarray(num_tokens, np.int64), np.asarray(num_cached, np.int64)
    seconds = np.asarray(seconds, float)
    columns = _columns(num_tokens, num_cached)
    c0, c1, c2 = (float(c) for c in fit_relative(columns, seconds))
    at = list(zip(num_tokens.tolist(), num_cached.tolist(), strict=True))
    return PrefillFit(
        profile=PrefillProfile(c0=c0, c1=c1, c2=c2),
        errors=report_errors(at, seconds, columns @ np.array((c0, c1, c2))),
    )


def _columns(num_tokens: Tokens, num_cached: Tokens) -> Floats:
    linear, square = num_tokens - num_cached, num_tokens**2 - num_cached**2
    return np.stack(np.broadcast_arrays(1.0, linear, square), axis=-1).astype(float)


class PrefillCost:
    """One instance's formula and how far off it is now."""

    def __init__(self, profile: PrefillProfile) -> None:
        self.profile = profile
        self.tracking = Tracking()

    def seconds(self, num_tokens: int, num_cached: int) -> float:
        return self.tracking.seconds(*self._parts(num_tokens, num_cached))

    @property
    def current(self) -> PrefillProfile:
        """The formula as it holds now."""
        linear, square, profile = self.tracking.linear, self.tracking.square, self.profile
        return PrefillProfile(
            c0=linear * profile.c0, c1=linear * profile.c1, c2=square * profile.c2
        )

    def observe(self, num_tokens: int, num_cached: int, seconds: float) -> None:
        """A prompt's computing took `seconds`, without its waiting. Impossible reports are ignored."""
        if 0 <= num_cached < num_tokens:
            self.tracking.observe(*self._parts(num_tokens, num_cached), seconds)

    def _parts(self, num_tokens: int, num_cached: int) -> tuple[float, float]:
        """What grows with tokens, a step's constant included, and what grows with their square."""
        square_s = self.profile.c2 * (num_tokens * num_tokens - num_cached * num_cached)
        return self.profile.seconds(num_tokens, num_cached) - square_s, square_s

    def validate(self) -> None:
        self.tracking.validate()
