"""The groups of parts that wait for one session: whose turn it is, and whose time is over.

Its rule: a small batch does not wait behind a large one, since parts are taken from the groups in turn.
One thread at a time uses it. Knows no sessions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from transfer.job import Group
from transfer.plan import Part


class Waiting:
    """Groups in turn; none is empty."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def add(self, group: Group) -> None:
        self._groups.append(group)

    def add_all_of(self, other: Waiting) -> None:
        """Which has none afterwards."""
        self._groups.extend(other._groups)
        other._groups.clear()

    @property
    def head(self) -> Group:
        """Whose turn it is."""
        return self._groups[0]

    def pop_head(self) -> Group:
        return self._groups.popleft()

    def pop_part(self) -> Part:
        """The next part of the head, whose turn is over with it."""
        group = self._groups[0]
        part = group.parts.popleft()
        if group.parts:
            self._groups.rotate(-1)
        else:
            self._groups.popleft()
        return part

    def pop_ended(self, now: float) -> list[Group]:
        """Those whose batch is cancelled or out of time."""
        return self._pop([g for g in self._groups if g.job.cancelled or g.job.deadline_at <= now])

    def pop_impatient(self, now: float) -> list[Group]:
        """Those that should be tried another way by now."""
        return self._pop([group for group in self._groups if group.give_up_at <= now])

    def pop_disconnected(self, now: float, connected_until: float) -> list[Group]:
        """Those that have waited long enough for a connection; all, if it was not for time."""
        if now < connected_until:
            return self._pop(list(self._groups))
        return self._pop([group for group in self._groups if group.connect_until <= now])

    def connect_until(self) -> float:
        """How long somebody here is ready to wait for a connection."""
        return max(group.connect_until for group in self._groups)

    def _pop(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            self._groups.remove(group)
        return groups
