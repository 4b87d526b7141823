"""Measures of a trace: spreads of samples, arrivals, sessions.

Times are seconds since the start of the trace. The candidate for extension is the request that last used the deepest
known block. A request extends it if it holds all full blocks of its prompt and only that session has used that block.
So users of a shared system prompt or document form no session. Turns with a rewritten prompt are not recognised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.analysis.prefixes import PrefixTree, Visit
from traces.format import TraceRecord

PERCENTS = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def spread(values: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> dict[str, float | None]:
    """Returns `mean`, `min`, `p1` … `p99`, `max`, all None for an empty sample. `weights`: repetitions per value."""
    sample = np.asarray(values, dtype=np.float64)
    if weights is not None:
        sample = np.repeat(sample, np.asarray(weights, dtype=np.int64))
    names = ("mean", "min", *(f"p{percent}" for percent in PERCENTS), "max")
    if not sample.size:
        return dict.fromkeys(names)
    figures: list[Any] = [
        sample.mean(),
        sample.min(),
        *np.percentile(sample, PERCENTS),
        sample.max(),
    ]
    return dict(zip(names, map(float, figures), strict=True))


Floats = npt.NDArray[np.float64]

# Windows of the index of dispersion. Short ones show batches, long ones show a drifting load.
DISPERSION_WINDOWS_S = (1.0, 10.0, 60.0)


def describe_arrivals(arrived_s: Sequence[float], window_s: float) -> dict[str, Any]:
    """Returns gaps, requests per second in windows of `window_s`, and two measures of burstiness.

    `gap_cv`: standard deviation / mean of the gaps, 1 for Poisson. `dispersion`: variance / mean of the number of
    requests per window, 1 for Poisson at every window length; None if the trace has fewer than two windows.
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
    """Returns the gaps per second of sorted arrival times; None if they span no time."""
    duration_s = arrived_s[-1] - arrived_s[0] if arrived_s else 0.0
    return float((len(arrived_s) - 1) / duration_s) if duration_s else None


def _counts(times: Floats, window_s: float) -> Floats:
    """Returns the requests per whole window. A partial last window is dropped, unless it is the only one."""
    since = times - times[0]
    whole = max(1, int(since[-1] // window_s))
    inside = since[since < whole * window_s]
    return np.bincount((inside // window_s).astype(np.int64), minlength=whole).astype(np.float64)


def _dispersion(times: Floats, window_s: float) -> float | None:
    counts = _counts(times, window_s)
    return _ratio(counts.var(), counts.mean()) if len(counts) > 1 else None


def _ratio(part: np.floating[Any], whole: np.floating[Any]) -> float | None:
    return float(part / whole) if whole else None


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that extends an earlier one."""

    session: int
    gap_s: float  # since the arrival of the extended request
    new_tokens: int


class _Sessions:
    """The session of each request, and the only session that has used each block."""

    def __init__(self) -> None:
        self.of_request: list[int] = []
        self.num_sessions = 0
        self._owner: dict[int, int | None] = {}  # block → its only session; None = several

    def place(self, visit: Visit, full_blocks: Sequence[int]) -> int | None:
        """Assigns a request to a session. Returns the request that it extends, or None."""
        earlier = self._extended(visit, full_blocks)
        session = self.num_sessions if earlier is None else self.of_request[earlier]
        self.num_sessions += earlier is None
        self.of_request.append(session)
        for block in visit.blocks:
            if self._owner.setdefault(block, session) != session:
                self._owner[block] = None
        return earlier

    def _extended(self, visit: Visit, full_blocks: Sequence[int]) -> int | None:
        if not visit.runs:
            return None
        earlier = visit.runs[-1].last_request
        whole = visit.num_seen >= full_blocks[earlier]
        alone = self._owner[visit.blocks[visit.num_seen - 1]] == self.of_request[earlier]
        return earlier if whole and alone else None


def turns_of(tree: PrefixTree, records: Sequence[TraceRecord]) -> tuple[list[Turn], int]:
    """Returns all turns but the first of each session, and the number of sessions, which may have a single turn."""
    sessions, extended = _placed(tree, records)
    turns = [
        Turn(
            sessions.of_request[request],
            records[request].arrived_s - records[earlier].arrived_s,
            records[request].input_length - records[earlier].input_length,
        )
        for request, earlier in enumerate(extended)
        if earlier is not None
    ]
    return turns, sessions.num_sessions


def turn_numbers(tree: PrefixTree, records: Sequence[TraceRecord]) -> list[int]:
    """Returns each request's turn number: 1, or one more than the request that it extends."""
    numbers: list[int] = []
    for earlier in _placed(tree, records)[1]:
        numbers.append(1 if earlier is None else numbers[earlier] + 1)
    return numbers


def _placed(tree: PrefixTree, records: Sequence[TraceRecord]) -> tuple[_Sessions, list[int | None]]:
    """Returns the sessions, and for each request the one that it extends."""
    sessions = _Sessions()
    full_blocks = [record.input_length // record.tokens_per_hash for record in records]
    return sessions, [sessions.place(visit, full_blocks) for visit in tree.visits]


def describe_sessions(tree: PrefixTree, records: Sequence[TraceRecord]) -> dict[str, Any]:
    """Returns numbers of sessions and turns, and the seconds and added prompt tokens between consecutive turns."""
    turns, num_sessions = turns_of(tree, records)
    later = Counter(turn.session for turn in turns)
    lengths = [1 + count for count in later.values()] + [1] * (num_sessions - len(later))
    return {
        "num_sessions": num_sessions,
        "extending_share": len(turns) / len(records),
        "turns": spread(lengths),
        "turn_gap_s": spread([turn.gap_s for turn in turns]),
        "turn_new_tokens": spread([turn.new_tokens for turn in turns]),
    }
