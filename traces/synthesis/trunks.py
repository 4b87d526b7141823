"""The hash ids of a growing trace: allocation of ids, chains of them, and prefixes that many sessions share.

Ids are allocated in the order in which they are written, so they are dense and the neighbours of a new block are its
chain. Rule of the format: an id always follows the same id. So a chain consists of the head of another one and new ids.

A *trunk* is the leading part of a prompt, such as a system prompt, that a minimum number of sessions begin with. Each
request keeps its trunk, so that trunks keep their length and popularity, and requests that share one share it again. A
trunk that the given trace uses for less than half of its time is *passing*: when a stretched trace starts a new round
of the given one, the trunk gets new ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traces.analysis.prefixes import PrefixTree
from traces.format import TraceRecord

Chain = tuple[int, ...]  # the ids of a prompt, from the head on


class BlockIds:
    """Allocates ids from 0 up."""

    def __init__(self) -> None:
        self._next = 0

    def extend(self, chain: Chain, count: int) -> Chain:
        """Returns the chain extended by `count` new ids."""
        self._next += count
        return (*chain, *range(self._next - count, self._next))


_MIN_SESSIONS = 10
_MIN_SHARE = 0.002  # of all requests
_LASTING_SHARE = 0.5  # of the trace's duration, from first to last use


@dataclass(frozen=True, slots=True)
class Trunk:
    """`path`: its blocks, as the given trace's tree numbers them. The first `lasting` of them are not passing."""

    path: tuple[int, ...]
    lasting: int


NO_TRUNK = Trunk((), 0)


def trunks_of(tree: PrefixTree, records: Sequence[TraceRecord], turns: Sequence[int]) -> list[Trunk]:
    """Returns each request's deepest trunk, in whole blocks. `turns`: each request's number in its session."""
    popular = _popular_blocks(tree, records, turns)
    span_s = (records[-1].arrived_s - records[0].arrived_s) * _LASTING_SHARE
    known: dict[int, Trunk] = {}
    trunks: list[Trunk] = []
    for record, visit in zip(records, tree.visits, strict=True):
        whole = visit.blocks[: record.input_length // record.tokens_per_hash]
        path = tuple(block for block in whole if block in popular)
        if path and path[-1] not in known:
            known[path[-1]] = Trunk(path, sum(popular[block] >= span_s for block in path))
        trunks.append(known[path[-1]] if path else NO_TRUNK)
    return trunks


def _popular_blocks(tree: PrefixTree, records: Sequence[TraceRecord], turns: Sequence[int]) -> dict[int, float]:
    """Returns the blocks that many sessions begin with, and the seconds from first to last use."""
    sessions = [0] * tree.num_blocks
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for request, (record, visit) in enumerate(zip(records, tree.visits, strict=True)):
        for block in visit.blocks[: record.input_length // record.tokens_per_hash]:
            sessions[block] += turns[request] == 1
            first.setdefault(block, request)
            last[block] = request
    enough = max(_MIN_SESSIONS, _MIN_SHARE * len(records))
    return {
        block: records[last[block]].arrived_s - records[first[block]].arrived_s
        for block, count in enumerate(sessions)
        if count >= enough
    }


TrunkKey = tuple[int, int] | None
"""Key of a trunk in a growing trace: its deepest block in the given trace's tree, and the round; None = no trunk."""


class TrunkChains:
    """Allocates the ids of trunks when they are first used."""

    def __init__(self, ids: BlockIds) -> None:
        self._ids = ids
        self._chains: dict[tuple[int, int], Chain] = {}  # (block, round) → ids up to the block
        self._round = 0

    def key(self, trunk: Trunk, round_number: int) -> TrunkKey:
        """Returns an equal key for the same trunk; if it is passing, only within a round."""
        if not trunk.path:
            return None
        return trunk.path[-1], 0 if trunk.lasting == len(trunk.path) else round_number

    def chain(self, trunk: Trunk, room: int, round_number: int) -> Chain:
        """Returns at most `room` blocks. `round_number`: repetitions of the given trace so far; may go back by one."""
        self._forget_before(round_number - 1)
        chain: Chain = ()
        for position, block in enumerate(trunk.path[:room]):
            key = (block, 0 if position < trunk.lasting else round_number)
            if key not in self._chains:
                self._chains[key] = self._ids.extend(chain, 1)
            chain = self._chains[key]
        return chain

    def _forget_before(self, round_number: int) -> None:
        """Drops passing trunks of earlier rounds, which are not used again."""
        if round_number <= self._round:
            return
        self._round = round_number
        self._chains = {key: chain for key, chain in self._chains.items() if not 0 < key[1] < round_number}
