"""What was decided about one request, with the instances it names: from the planner to the books. Frozen data."""

from __future__ import annotations

from typing import NamedTuple

from conductor.cost.accuracy import Times
from conductor.decision import Decision
from conductor.fairness.turns import Queueing
from conductor.members import Instance
from protocol.request import PrefixSource


class Plan(NamedTuple):
    """A decision with the instances it names."""

    decision: Decision
    prefill: Instance
    decode: Instance
    sources: tuple[PrefixSource, ...]
    reads: tuple[tuple[Instance, int], ...]  # blocks to read from each store
    predicted: Times
    prefill_s: float  # predicted service time
    rank: float  # with which it waits for prefill
    queueing: Queueing
    uncached_tokens: int
    needed_blocks: int
    block_bytes: int
    step_s: float  # between its tokens
    foreseen_seqs: float  # of placed requests, beside it when it lands
