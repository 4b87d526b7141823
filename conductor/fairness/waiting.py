"""Columns of the prompts that are placed and not prefilled yet: tenants, tags and places in the queues. Pure.

A place is the one in `PrefillQueue`: placement time + rank in seconds, lowest first. An instance is identified by its
link (`conductor.transfers`). Rule: a prompt is here exactly as long as it is in its instance's queue. Rows are compact
and unordered. Knows of a tag only that the lower one goes first.
"""

from __future__ import annotations

import math

import numpy as np

from conductor.columns import Floats, Ints
from protocol.ids import RequestId

_FIRST_ROWS = 64
# Distance to the prompt in front: a thousand prompts fit between two that were placed a millisecond apart. Places are
# monotonic seconds, which do not resolve less (`turns`).
_BEHIND_S = 1e-6
_BEFORE_ALL_S = 1e-3


class WaitingPrompts:
    """The waiting prompts of all instances."""

    def __init__(self) -> None:
        self._ids: list[RequestId] = []
        self._row: dict[RequestId, int] = {}
        # None: the prompt that had it is gone, and the minimum has to be computed again.
        self._least_tag: float | None = math.inf
        self._tags = np.zeros(_FIRST_ROWS)
        self._places = np.zeros(_FIRST_ROWS)
        self._links = np.zeros(_FIRST_ROWS, np.int64)
        self._tenants = np.zeros(_FIRST_ROWS, np.int64)
        self._priorities = np.zeros(_FIRST_ROWS, np.int64)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._row

    def add(
        self,
        request_id: RequestId,
        *,
        tag: float,
        place: float,
        link: int,
        tenant: int,
        priority: int,
    ) -> None:
        """Adds a prompt that is not here yet."""
        row = len(self._ids)
        if row == len(self._tags):
            self._grow()
        self._ids.append(request_id)
        self._row[request_id] = row
        if self._least_tag is not None:
            self._least_tag = min(self._least_tag, tag)
        self._tags[row], self._places[row], self._links[row] = tag, place, link
        self._tenants[row], self._priorities[row] = tenant, priority

    def remove(self, request_id: RequestId) -> bool:
        """Removes a prompt; the last row moves into its row. Returns False if it is not here."""
        row = self._row.pop(request_id, None)
        if row is None:
            return False
        last_id, last = self._ids.pop(), len(self._ids)
        if self._tags[row] == self._least_tag:
            self._least_tag = None
        if row != last:
            self._ids[row], self._row[last_id] = last_id, row
            for column in self._columns():
                column[row] = column[last]
        return True

    def at(self, link: int) -> list[RequestId]:
        """Returns the prompts that wait at one instance."""
        return [self._ids[row] for row in np.flatnonzero(self._links[: len(self)] == link).tolist()]

    def least_tag(self) -> float:
        """Returns the smallest tag; infinite if no prompt waits."""
        if self._least_tag is None:
            self._least_tag = float(self._tags[: len(self)].min()) if self._ids else math.inf
        return self._least_tag

    def has_below(self, priority: int) -> bool:
        """Returns True if a prompt of less urgent priority, that is of a larger number, waits."""
        return bool(self._ids) and int(self._priorities[: len(self)].max()) > priority

    def places_to_take(self, tag: float, tenant: int | None, priority: int, links: Ints) -> Floats | None:
        """Returns for each instance the place just before its first prompt with a later tag, of another tenant and this
        priority, and behind all prompts in front of that one. Infinite if an instance has none; None if no instance
        has one. `tenant`: None = has no account yet."""
        num_rows = len(self)
        is_later = self._tags[:num_rows] > tag
        is_later &= self._priorities[:num_rows] == priority
        if tenant is not None:
            is_later &= self._tenants[:num_rows] != tenant
        rows = np.flatnonzero(is_later)
        if not rows.size:
            return None
        at, places = self._links[:num_rows], self._places[:num_rows]
        num_links = max(int(at.max()), int(links.max())) + 1
        first, last = np.full(num_links, math.inf), np.full(num_links, -math.inf)
        np.minimum.at(first, at[rows], places[rows])
        before = np.flatnonzero(places < first[at])
        np.maximum.at(last, at[before], places[before])
        places_taken: Floats = np.full(len(links), math.inf)
        here = np.flatnonzero(np.isfinite(first[links]))
        first, last = first[links[here]], last[links[here]]
        behind = np.minimum(last + _BEHIND_S, (last + first) / 2)
        places_taken[here] = np.where(np.isinf(last), first - _BEFORE_ALL_S, behind)
        return places_taken

    def _columns(self) -> tuple[Floats | Ints, ...]:
        return self._tags, self._places, self._links, self._tenants, self._priorities

    def _grow(self) -> None:
        self._tags, self._places = (np.resize(c, 2 * len(c)) for c in (self._tags, self._places))
        self._links, self._tenants, self._priorities = (
            np.resize(c, 2 * len(c)) for c in (self._links, self._tenants, self._priorities)
        )

    def tenants(self) -> list[int]:
        """Returns the tenant number of every row; for `validate`."""
        found: list[int] = self._tenants[: len(self)].tolist()
        return found

    def validate(self) -> None:
        assert self._row == {request_id: row for row, request_id in enumerate(self._ids)}
        assert {len(column) for column in self._columns()} == {len(self._tags)}
        assert self.least_tag() == self._tags[: len(self)].min(initial=math.inf)
