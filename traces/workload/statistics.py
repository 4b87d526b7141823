"""All measures of a trace as one JSON object: FAST'25, table 2 and figure 9, and the distributions behind them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moonserve.traces.format import TraceRecord
from moonserve.traces.workload.prefix_tree import Ints, PrefixTree, Visit, prefix_tree

# Measures of a trace: spreads of samples, arrivals, sessions.
#
# Times are seconds since the start of the trace. The candidate for extension is the request that last used the deepest
# known block. A request extends it if it holds all full blocks of its prompt and only that session has used that
# block. So users of a shared system prompt or document form no session. Turns with a rewritten prompt are not
# recognised.

PERCENTS = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def distribution(values: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> dict[str, float | None]:
    """Returns `mean`, `min`, `p1` … `p99`, `max`, all None for an empty sample. `weights`: repetitions per value."""
    sample = np.asarray(values, dtype=np.float64)
    if weights is not None:
        sample = np.repeat(sample, np.asarray(weights, dtype=np.int64))
    names = ("mean", "min", *(f"p{percent}" for percent in PERCENTS), "max")
    if not sample.size:
        return dict.fromkeys(names)
    figures: list[Any] = [sample.mean(), sample.min(), *np.percentile(sample, PERCENTS), sample.max()]
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
    rates = _requests_per_window(times, window_s) / window_s
    return {
        "duration_s": duration_s,
        "mean_rate": mean_rate(arrived_s),
        "gap_s": distribution(gaps),
        "gap_cv": _ratio(gaps.std(), gaps.mean()) if len(gaps) else None,
        "window_s": window_s,
        "window_rate": distribution(rates),
        "rates": [round(float(rate), 6) for rate in rates],
        "peak_to_mean": _ratio(rates.max(), rates.mean()) if len(rates) else None,
        "dispersion": {f"{w:g}s": _dispersion(times, w) for w in DISPERSION_WINDOWS_S},
    }


def mean_rate(arrived_s: Sequence[float]) -> float | None:
    """Returns the gaps per second of sorted arrival times; None if they span no time."""
    duration_s = arrived_s[-1] - arrived_s[0] if arrived_s else 0.0
    return float((len(arrived_s) - 1) / duration_s) if duration_s else None


def _requests_per_window(times: Floats, window_s: float) -> Floats:
    """Returns the requests per whole window. A partial last window is dropped, unless it is the only one."""
    since = times - times[0]
    whole = max(1, int(since[-1] // window_s))
    inside = since[since < whole * window_s]
    return np.bincount((inside // window_s).astype(np.int64), minlength=whole).astype(np.float64)


def _dispersion(times: Floats, window_s: float) -> float | None:
    counts = _requests_per_window(times, window_s)
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
    sessions = _Sessions()
    full_blocks = [record.input_length // record.tokens_per_hash for record in records]
    extended = [sessions.place(visit, full_blocks) for visit in tree.visits]
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


def describe_sessions(tree: PrefixTree, records: Sequence[TraceRecord]) -> dict[str, Any]:
    """Returns numbers of sessions and turns, and the seconds and added prompt tokens between consecutive turns."""
    turns, num_sessions = turns_of(tree, records)
    later = Counter(turn.session for turn in turns)
    lengths = [1 + count for count in later.values()] + [1] * (num_sessions - len(later))
    return {
        "num_sessions": num_sessions,
        "extending_share": len(turns) / len(records),
        "turns": distribution(lengths),
        "turn_gap_s": distribution([turn.gap_s for turn in turns]),
        "turn_new_tokens": distribution([turn.new_tokens for turn in turns]),
    }


# LRU hits for all cache capacities in one pass (FAST'25, figure 9; Mattson's stack distances, 1970).
#
# A request uses its chain from tail to head, so a block's last use is never older than that of the blocks after it.
# Hence a cache of C blocks holds the C blocks used last, for every C at once (inclusion). They are always whole
# prefixes, and the store's leaf-first LRU evicts the same blocks: a test compares the hits with those of its catalog.
#
# Blocks last used by the same request are adjacent in the stack. So a tree of counts per request suffices, and a chain
# costs O(runs · log requests) instead of O(blocks · log blocks). A partial last block occupies a block of the cache
# and is no hit. A chain longer than the cache hits as far as the cache reaches. Does not know time.


class _SuffixSums:
    """Counts at positions 0 … size − 1 with suffix sums in O(log size) (Fenwick, 1994)."""

    def __init__(self, size: int) -> None:
        self._sums = [0] * (size + 1)
        self.total = 0

    def add(self, position: int, count: int) -> None:
        self.total += count
        index = position + 1
        while index < len(self._sums):
            self._sums[index] += count
            index += index & -index

    def after(self, position: int) -> int:
        """Returns the sum of the counts after `position`."""
        index = position + 1
        before = 0
        while index:
            before += self._sums[index]
            index &= index - 1
        return self.total - before


@dataclass(frozen=True, slots=True)
class HitCurve:
    """`hits[c]`: full blocks that an LRU cache of c blocks supplies over the whole trace, c from 0."""

    hits: Ints
    input_tokens: int
    tokens_per_block: int

    def ratio(self, capacity_tokens: int | None) -> float:
        """Returns the hits in tokens as a share of all prompt tokens. None = unlimited capacity."""
        last = len(self.hits) - 1
        blocks = last if capacity_tokens is None else capacity_tokens // self.tokens_per_block
        return int(self.hits[min(blocks, last)]) * self.tokens_per_block / self.input_tokens

    def distance_percentile(self, percent: float) -> int | None:
        """Returns the reuse distance (distinct tokens) that `percent` of all hits do not exceed; None without hits."""
        total = int(self.hits[-1])
        if not total:
            return None
        blocks = int(np.searchsorted(self.hits, percent / 100 * total))
        return blocks * self.tokens_per_block


def hit_curve(tree: PrefixTree, *, input_tokens: int, tokens_per_block: int) -> HitCurve:
    """Returns the hit curve of a tree. An empty tree has a curve of zeros."""
    rises = np.zeros(tree.num_blocks + 2, dtype=np.int64)  # differences of the number of hits by stack distance
    counts = _SuffixSums(len(tree.visits))
    for request, visit in enumerate(tree.visits):
        for distance, length in _distances(counts, visit):
            rises[distance] += 1
            rises[distance + length] -= 1
        _move_to_top(counts, request, visit)
    at_distance = np.cumsum(rises)
    return HitCurve(np.cumsum(at_distance)[:-1], input_tokens, tokens_per_block)


def _distances(counts: _SuffixSums, visit: Visit) -> Iterator[tuple[int, int]]:
    """Yields (stack distance of the first block, length) of each run of usable blocks. Distance 1 = used last."""
    for run in visit.runs:
        length = min(run.begin + run.length, visit.usable) - run.begin
        if length > 0:
            # Above the run in the stack are the blocks of later requests, including the head of this chain.
            yield counts.after(run.last_request) + 1, length


def _move_to_top(counts: _SuffixSums, request: int, visit: Visit) -> None:
    for run in visit.runs:
        counts.add(run.last_request, -run.length)
    counts.add(request, len(visit.blocks))


# Figure 9 of the paper has 1k … 50k blocks. The DRAM of one of its machines holds 3M tokens.
CAPACITIES_TOKENS = (
    300_000, 500_000, 1_000_000, 2_000_000, 3_000_000, 5_000_000, 10_000_000, 20_000_000,
    30_000_000, 50_000_000, 100_000_000,
)  # fmt: skip
_RANKS_PER_DECADE = 8


def describe_sharing(tree: PrefixTree, records: Sequence[TraceRecord]) -> dict[str, Any]:
    """Returns popularity by rank, chain lengths, the share of blocks used once, and seconds between uses."""
    ranked = np.sort(tree.uses)[::-1]
    return {
        "num_blocks": tree.num_blocks,
        "used_once_share": float((tree.uses == 1).mean()),
        "popularity": [{"rank": rank, "uses": int(ranked[rank - 1])} for rank in log_ranks(len(ranked))],
        "chain_blocks": distribution([len(visit.blocks) for visit in tree.visits]),
        "reuse_s": _reuse_seconds(tree, records),
    }


def log_ranks(count: int) -> list[int]:
    """Returns ranks from 1 to `count`, evenly spaced in the logarithm."""
    decades = np.log10(max(count, 1))
    points = 10 ** np.linspace(0, decades, int(decades * _RANKS_PER_DECADE) + 1)
    return sorted({min(count, round(float(point))) for point in points}) if count else []


def _reuse_seconds(tree: PrefixTree, records: Sequence[TraceRecord]) -> dict[str, float | None]:
    """Returns the spread of the seconds between two uses of a block, over all reuses."""
    gaps = [
        (record.arrived_s - records[run.last_request].arrived_s, run.length)
        for record, visit in zip(records, tree.visits, strict=True)
        for run in visit.runs
    ]
    return distribution([gap for gap, _ in gaps], [length for _, length in gaps])


def analyze(
    records: Sequence[TraceRecord], *, window_s: float = 60.0, capacities_tokens: Sequence[int] = CAPACITIES_TOKENS
) -> dict[str, Any]:
    """Returns the statistics of at least one record. Ratios are shares of prompt tokens and count full blocks only.

    `cache_ratio`: hit ratio of an unlimited cache, equal to the `ideal_hit_ratio` of a replay.
    """
    tree = prefix_tree(records)
    inputs = [record.input_length for record in records]
    outputs = [record.output_length for record in records]
    curve = hit_curve(tree, input_tokens=sum(inputs), tokens_per_block=records[0].tokens_per_hash)
    return {
        "num_requests": len(records),
        "total_input_tokens": sum(inputs),
        "total_output_tokens": sum(outputs),
        "cache_ratio": curve.ratio(None),
        "input_length": distribution(inputs),
        "output_length": distribution(outputs),
        "arrivals": describe_arrivals([record.arrived_s for record in records], window_s),
        "prefixes": describe_sharing(tree, records),
        "lru": {
            "curve": [{"capacity_tokens": c, "hit_ratio": curve.ratio(c)} for c in (*capacities_tokens, None)],
            "reuse_distance_tokens": {f"p{percent}": curve.distance_percentile(percent) for percent in PERCENTS},
        },
        "sessions": describe_sessions(tree, records),
    }
