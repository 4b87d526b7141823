"""The prefix tree of a trace's requests: which request used each block, and which used it last before.

Built in one pass over the records. A block is a node of the tree: a hash id together with all ids before it. An id
after two different prefixes counts as two blocks. Blocks and requests are numbered in order of appearance. Rule: the
blocks of a request seen before are the head of its chain, because a request uses all blocks before the ones it uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonserve.traces.format import TraceRecord

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Adjacent blocks of a request's chain whose last use was by the same request."""

    last_request: int
    begin: int  # position in the chain
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A request's chain, and the runs of blocks seen before, from the first block on."""

    blocks: tuple[int, ...]
    runs: tuple[BlockRun, ...]
    usable: int  # leading blocks that a cache of full blocks may supply; the last token is always computed

    @property
    def num_seen(self) -> int:
        return self.runs[-1].begin + self.runs[-1].length if self.runs else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """All visits, and the number of uses of each block."""

    visits: Sequence[Visit]
    uses: Ints

    @property
    def num_blocks(self) -> int:
        return len(self.uses)


class _TreeBuilder:
    """The tree under construction."""

    def __init__(self) -> None:
        self.children: dict[tuple[int | None, int], int] = {}  # (parent, hash id) → block
        self.uses: list[int] = []
        self.last_request: list[int] = []

    def visit(self, request: int, record: TraceRecord) -> Visit:
        blocks: list[int] = []
        runs: list[BlockRun] = []
        parent: int | None = None
        for depth, hash_id in enumerate(record.hash_ids):
            block = self.children.get((parent, hash_id))
            if block is None:
                block = self._add(parent, hash_id, request)
            else:
                _extend_runs(runs, self.last_request[block], depth)
                self.uses[block] += 1
                self.last_request[block] = request
            blocks.append(block)
            parent = block
        usable = (record.input_length - 1) // record.tokens_per_hash
        return Visit(blocks=tuple(blocks), runs=tuple(runs), usable=min(usable, len(blocks)))

    def _add(self, parent: int | None, hash_id: int, request: int) -> int:
        block = len(self.uses)
        self.children[parent, hash_id] = block
        self.uses.append(1)
        self.last_request.append(request)
        return block


def _extend_runs(runs: list[BlockRun], last_request: int, depth: int) -> None:
    if runs and runs[-1].last_request == last_request:
        runs[-1] = BlockRun(last_request, runs[-1].begin, runs[-1].length + 1)
    else:
        runs.append(BlockRun(last_request, depth, 1))


def prefix_tree(records: Sequence[TraceRecord]) -> PrefixTree:
    """Returns the prefix tree of the records, in O(number of hash ids)."""
    growing = _TreeBuilder()
    visits = [growing.visit(request, record) for request, record in enumerate(records)]
    return PrefixTree(visits=visits, uses=np.array(growing.uses, dtype=np.int64))
