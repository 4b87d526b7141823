"""Sessions: requests that extend an earlier one, as the next turn of a conversation does.

A request extends the one that last used its deepest known block when it holds all full blocks of that prompt and nobody
outside the session has used that block: so a system prompt or a document that many share makes no session of its users.
Knows the prefix tree only: turns whose prompt was rewritten do not show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from traces.analysis.prefixes import PrefixTree, Visit
from traces.analysis.spread import spread
from traces.format import TraceRecord


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that extends an earlier one."""

    session: int
    gap_s: float  # since the arrival of the one it extends
    new_tokens: int


class _Sessions:
    """Which session each request belongs to, and which session alone has used each block."""

    def __init__(self) -> None:
        self.of_request: list[int] = []
        self.num_sessions = 0
        self._owner: dict[int, int | None] = {}  # block → its only session; None: several

    def place(self, visit: Visit, full_blocks: Sequence[int]) -> int | None:
        """Puts a request into a session; returns the request that it extends, if it does."""
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
    """All later turns, and the number of sessions (a request that nobody extends is one of one turn)."""
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
    """Of each request: 1 more than of the one that it extends, 1 when it extends none."""
    numbers: list[int] = []
    for earlier in _placed(tree, records)[1]:
        numbers.append(1 if earlier is None else numbers[earlier] + 1)
    return numbers


def _placed(tree: PrefixTree, records: Sequence[TraceRecord]) -> tuple[_Sessions, list[int | None]]:
    """The sessions, and of each request the one that it extends."""
    sessions = _Sessions()
    full_blocks = [record.input_length // record.tokens_per_hash for record in records]
    return sessions, [sessions.place(visit, full_blocks) for visit in tree.visits]


def describe_sessions(tree: PrefixTree, records: Sequence[TraceRecord]) -> dict[str, Any]:
    """Numbers of sessions and turns; seconds and prompt tokens from a turn to the next."""
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
