"""Formulae of the time of prefill and decode steps, their fit to measurements, and the prompt chunks that fit into a
decode step's objective. Pure.

Workers measure and register the coefficients of `PrefillProfile` and `DecodeProfile`. The conductor predicts with them,
prefill workers compare loading a prefix with computing it, and the simulator runs on them.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moonserve.protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coefficients:
    c0: float
    c1: float
    c2: float

    def __post_init__(self) -> None:
        """Raises InvalidRequest for coefficients with which the choice of the best instance would be wrong."""
        coefficients = (self.c0, self.c1, self.c2)
        if not all(math.isfinite(c) and c >= 0 for c in coefficients):
            raise InvalidRequest(f"profile coefficients must be finite and not negative: {coefficients}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProfile(_Coefficients):
    """t(n, p) = c0 + c1·(n−p) + c2·(n²−p²) seconds for n prompt tokens of which p are cached."""

    def seconds(self, num_tokens: int, num_cached: int) -> float:
        return (
            self.c0
            + self.c1 * (num_tokens - num_cached)
            + self.c2 * (num_tokens * num_tokens - num_cached * num_cached)
        )

    def is_worth_joining(self, num_tokens: int, num_cached: int, *, num_delayed: int, num_waiting: int) -> bool:
        """Returns true if adding the rest of a prompt to a step that completes other prompts costs less waiting in all.

        The addition delays `num_delayed` first tokens. It saves `num_waiting` prompts, including this one, the constant
        c0 of a separate step."""
        added_s = self.seconds(num_tokens, num_cached) - self.c0
        return num_delayed * added_s <= num_waiting * self.c0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeProfile(_Coefficients):
    """t(b, c) = c0 + c1·b + c2·c seconds per step of b sequences with c tokens of context in total."""

    def step_s(self, num_seqs: float, context_tokens: float) -> float:
        return self.c0 + self.c1 * num_seqs + self.c2 * context_tokens

    def batch_step_s(self, num_seqs: int, context_tokens: int, max_num_seqs: int) -> float:
        """Returns `step_s` of a batch of at most `max_num_seqs` sequences (0 = unlimited); the others wait."""
        if 0 < max_num_seqs < num_seqs:
            return self.step_s(max_num_seqs, context_tokens * max_num_seqs / num_seqs)
        return self.step_s(num_seqs, context_tokens)


# A small model on one CPU core, until a worker has measured: about 1,000 prompt tokens per second, 20 ms for a decode
# step of one sequence.
DEFAULT_PREFILL = PrefillProfile(c0=0.005, c1=1e-3, c2=1e-8)
DEFAULT_DECODE = DecodeProfile(c0=0.015, c1=0.003, c2=2e-6)


# Fit to measured points by non-negative least squares of the relative error. A negative coefficient would predict
# negative times somewhere.

Floats = npt.NDArray[np.float64]

_MAX_COLUMNS = 6  # every subset of the columns is tried


def fit_relative(columns: Floats, seconds: Floats) -> Floats:
    """Returns the c ≥ 0, shape [k], that minimizes Σ (columns · c / seconds − 1)².

    `columns` has shape [points, k], `seconds` [points]. The minimum over c ≥ 0 is the unconstrained minimum over the
    columns with nonzero coefficients (Lawson & Hanson 1974, ch. 23), so all subsets of the few columns are tried.
    Raises InvalidRequest for no points, too many columns, infinite or NaN values, and times that are not above zero."""
    columns, seconds = np.asarray(columns, float), np.asarray(seconds, float)
    _check(columns, seconds)
    rows = columns / seconds[:, None]
    # Columns such as n² and 1 differ widely. Scaled to equal norms, no singular value is small enough to count as zero.
    sizes = np.linalg.norm(rows, axis=0)
    sizes[sizes == 0.0] = 1.0
    coefficients: Floats = _fit_subsets(rows / sizes) / sizes
    return coefficients


def _fit_subsets(rows: Floats) -> Floats:
    num_points, num_columns = rows.shape
    best, best_error = np.zeros(num_columns), float(num_points)
    for count in range(1, num_columns + 1):
        for active in map(list, itertools.combinations(range(num_columns), count)):
            solution = np.linalg.lstsq(rows[:, active], np.ones(num_points), rcond=None)[0]
            error = float(np.sum((rows[:, active] @ solution - 1.0) ** 2))
            if (solution >= 0.0).all() and error < best_error:
                best, best_error = np.zeros(num_columns), error
                best[active] = solution
    return best


def _check(columns: Floats, seconds: Floats) -> None:
    if columns.ndim != 2 or columns.shape[0] != seconds.size or not seconds.size:
        raise InvalidRequest(f"the columns' shape {columns.shape} does not match {seconds.size} measured times")
    if columns.shape[1] > _MAX_COLUMNS:
        raise InvalidRequest(f"a formula can have at most {_MAX_COLUMNS} coefficients, not {columns.shape[1]}")
    if not (np.isfinite(columns).all() and np.isfinite(seconds).all() and (seconds > 0).all()):
        raise InvalidRequest("measured times must be finite and above zero")


# Prompt chunks in decode steps. A step with a chunk is assumed to take the time of the decode step plus that of the
# chunk; savings of a kernel that does both at once are not counted. Worker, conductor and simulator share this code, so
# that predictions match execution.

# A prompt advances by this many tokens even if decoding alone exhausts the budget, so that sequences that join later
# cannot starve it. On eight A800 (traces.simulator.model_profiles), 16 tokens after a context of 12,000 take 2 ms.
MIN_CHUNK_TOKENS = 16

# Share of the TBT objective that a step with chunks may take. A joining sequence waits for the running step and then
# for its own. With one half, both together meet the objective; in a short answer such a gap determines the TBT
# (docs/conditional-disaggregation.md compares other shares).
CHUNK_SHARE = 0.5

DEFAULT_TBT_SLO_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """Time budget of a step with chunks. `max_step_s` is its limit in seconds; the profiles are the worker's."""

    decode: DecodeProfile
    prefill: PrefillProfile
    max_step_s: float

    def __post_init__(self) -> None:
        if not 0.0 < self.max_step_s < math.inf:
            raise InvalidRequest(f"the longest step must take a finite time above 0 s, not {self.max_step_s} s")

    def slowed(self, factor: float) -> "StepBudget":
        """Returns the budget for a worker whose steps take `factor` times as long as its profiles predict."""
        return self if factor == 1.0 else replace(self, max_step_s=self.max_step_s / factor)

    def step_s(self, num_seqs: int, context_tokens: int, chunks: Iterable[tuple[int, int]]) -> float:
        """Returns the predicted time of a step. `chunks` holds (tokens done, tokens to compute) of each prompt."""
        decode_s = self.decode.step_s(num_seqs, context_tokens) if num_seqs else 0.0
        return decode_s + sum(self.prefill.seconds(done + n, done) for done, n in chunks)

    def chunks(self, num_seqs: int, context_tokens: int, prompts: Iterable[tuple[int, int]], most: int) -> list[int]:
        """Returns the chunk sizes of the leading `prompts` in a step in which `num_seqs` sequences decode.

        `prompts` holds (tokens done, tokens missing); `most` limits the sum of the chunks. The next prompt only joins
        if the rest of the one before fits completely."""
        found: list[int] = []
        spent_s = self.decode.step_s(num_seqs, context_tokens) if num_seqs else 0.0
        for num_done, missing in prompts:
            if most <= 0:
                break
            limit = min(missing, most)
            if found:
                chunk = self._fitting(self.max_step_s - spent_s - self.prefill.c0, num_done, limit)
            else:
                chunk = self.chunk_tokens(spent_s, num_done, limit)
            if not chunk:
                break
            found.append(chunk)
            spent_s += self.prefill.seconds(num_done + chunk, num_done)
            most -= chunk
            if chunk < missing:
                break
        return found

    def chunk_tokens(self, spent_s: float, num_done: int, most: int) -> int:
        """Returns the size of a prompt's next chunk after `num_done` tokens, in a step that takes `spent_s` without it.

        The chunk fits the budget but has at least MIN_CHUNK_TOKENS tokens, and at most `most`."""
        room_s = self.max_step_s - spent_s - self.prefill.c0
        return min(max(self._fitting(room_s, num_done, most), MIN_CHUNK_TOKENS), most)

    def _fitting(self, room_s: float, num_done: int, most: int) -> int:
        """Returns the largest n ≤ `most` with c1·n + c2·((p + n)² − p²) ≤ `room_s`, for p = `num_done`."""
        linear = self.prefill.c1 + 2.0 * self.prefill.c2 * num_done
        square = self.prefill.c2
        if room_s <= 0.0:
            return 0
        if square * most * most + linear * most <= room_s:
            return most
        # This form of the root does not subtract two nearly equal numbers.
        root = math.sqrt(linear * linear + 4.0 * square * room_s)
        return min(int(2.0 * room_s / (linear + root)), most)
