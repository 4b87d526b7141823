"""When requests come: gaps, rate over time, burstiness. Seconds since the trace began."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.analysis.spread import spread

Floats = npt.NDArray[np.float64]

# Windows of the index of dispersion: shorter ones see batches, longer ones see load that drifts.
DISPERSION_WINDOWS_S = (1.0, 10.0, 60.0)


def describe_arrivals(arrived_s: Sequence[float], window_s: float) -> dict[str, Any]:
    """Gaps, requests per second in windows of `window_s`, and two measures of burstiness.

    `gap_cv`: deviation over mean of the gaps, 1 for Poisson. `dispersion`: variance over mean of the number of
    requests per window, 1 for Poisson at every window; null where the trace has fewer than two such windows.
    """
    times = np.asarray(arrived_s, dtype=np.float64)
    duration_s = float(times[-1] - times[0])
    gaps = np.diff(times)
    rates = _counts(times, window_s) / window_s
    return {
        "duration_s": duration_s,
        "mean_rate": mean_rate(arrived_s),
        "gap_s": spread(gaps),
        "gap_cv": _ratio(gaps.std(), gaps.mean()) if len(gaps) else None,
        "window_s": window_s,
        "window_rate": spread(rates),
        "rates": [round(float(rate), 6) for rate in rates],
        "peak_to_mean": _ratio(rates.max(), rates.mean()) if len(rates) else None,
        "dispersion": {f"{w:g}s": _dispersion(times, w) for w in DISPERSION_WINDOWS_S},
    }


def mean_rate(arrived_s: Sequence[float]) -> float | None:
    """Gaps per second, of instants in order; null where all come at once."""
    duration_s = arrived_s[-1] - arrived_s[0] if arrived_s else 0.0
    return float((len(arrived_s) - 1) / duration_s) if duration_s else None


def _counts(times: Floats, window_s: float) -> Floats:
    """Requests per whole window; the rest of the last one is left out, but for a trace shorter than one."""
    since = times - times[0]
    whole = max(1, int(since[-1] // window_s))
    inside = since[since < whole * window_s]
    return np.bincount((inside // window_s).astype(np.int64), minlength=whole).astype(np.float64)


def _dispersion(times: Floats, window_s: float) -> float | None:
    counts = _counts(times, window_s)
    return _ratio(counts.var(), counts.mean()) if len(counts) > 1 else None


def _ratio(part: np.floating[Any], whole: np.floating[Any]) -> float | None:
    return float(part / whole) if whole else None
