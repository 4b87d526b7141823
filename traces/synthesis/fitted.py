"""What a trace in the likeness of another takes from it: per request a few numbers, no ids and no order of blocks.

A *donor* is one request of the given trace, reduced to lengths, the gap before it, which of the widely shared prefixes
it begins with, and how it reuses beyond that: how many leading blocks, how long after their last use, how popular the
deepest of them was, and how much of the earlier prompt it left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import ConfigError
from traces.analysis.prefixes import Visit, prefix_tree
from traces.analysis.sessions import turn_numbers
from traces.format import TraceRecord
from traces.synthesis.trunks import Trunk, trunks_of

MIN_REQUESTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """How a request begins with an earlier one's blocks."""

    blocks: int  # leading ones, at least 1
    after_s: float  # since the last use of the deepest one
    uses: int  # of the deepest one, so far; 1: nobody but the earlier request has it
    left: int  # whole blocks of the earlier prompt behind them
    repeats: bool  # the earlier prompt once more, its partial last block included


@dataclass(frozen=True, slots=True, kw_only=True)
class Donor:
    """One request of the given trace."""

    arrived_s: float
    gap_s: float  # since the request before
    input_length: int
    output_length: int
    turn: int  # in its session, as `traces.analysis.sessions` counts; 1: extends no earlier prompt
    trunk: Trunk
    reuse: Reuse | None  # that goes deeper than the trunk


@dataclass(frozen=True, slots=True)
class Fit:
    """All donors in the order of time."""

    donors: Sequence[Donor]

    @property
    def duration_s(self) -> float:
        return self.donors[-1].arrived_s

    @property
    def longest_input(self) -> int:
        """In tokens."""
        return max(donor.input_length for donor in self.donors)

    @property
    def rate(self) -> float:
        """Mean requests per second; `fit` has made sure that time passes."""
        return (len(self.donors) - 1) / self.duration_s


def fit(records: Sequence[TraceRecord]) -> Fit:
    """Raises ConfigError when there is too little to learn from."""
    if len(records) < MIN_REQUESTS:
        raise ConfigError(
            f"{len(records)} requests are too few to be like; a trace needs {MIN_REQUESTS}"
        )
    if records[-1].arrived_s <= records[0].arrived_s:
        raise ConfigError("all requests come at once, so there is no rate to be like")
    tree = prefix_tree(records)
    turns = turn_numbers(tree, records)
    trunks = trunks_of(tree, records, turns)
    uses = [0] * tree.num_blocks
    donors: list[Donor] = []
    for request, record in enumerate(records):
        visit, trunk = tree.visits[request], trunks[request]
        reuse = _reuse(record, visit, records, uses)
        donors.append(
            Donor(
                arrived_s=record.arrived_s - records[0].arrived_s,
                gap_s=record.arrived_s - records[max(0, request - 1)].arrived_s,
                input_length=record.input_length,
                output_length=record.output_length,
                turn=turns[request],
                trunk=trunk,
                reuse=reuse if reuse and reuse.blocks > len(trunk.path) else None,
            )
        )
        for block in visit.blocks:
            uses[block] += 1
    return Fit(donors)


def _reuse(
    record: TraceRecord, visit: Visit, records: Sequence[TraceRecord], uses: Sequence[int]
) -> Reuse | None:
    """Whole blocks only, unless the prompt repeats an earlier one to its end. `uses`: of each block, before this."""
    if not visit.runs:
        return None
    earlier = records[visit.runs[-1].last_request]
    repeats = visit.num_seen == len(visit.blocks) == len(earlier.hash_ids)
    earlier_whole = earlier.input_length // earlier.tokens_per_hash
    whole = min(record.input_length // record.tokens_per_hash, earlier_whole)
    blocks = visit.num_seen if repeats else min(visit.num_seen, whole)
    if not blocks:
        return None
    return Reuse(
        blocks=blocks,
        after_s=record.arrived_s - earlier.arrived_s,
        uses=uses[visit.blocks[blocks - 1]],
        left=max(0, earlier_whole - blocks),
        repeats=repeats,
    )
