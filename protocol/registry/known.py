"""Whom a process believes to be there, from what it hears of the registry. Pure: `now` is an argument.

Rules: silence changes nothing, so a registry that cannot be reached takes nobody away. A member that is missing from an
answer is believed in for `linger_s` more: a registry that restarted empty hears of its members only when their next
renewal is refused, and the data plane must not notice. Does not know whether a member really answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from protocol.registry.base import RENEW_EVERY_S, Member

LINGER_S = 2 * RENEW_EVERY_S
"""A renewal that is refused, and one that was lost before it. A process that died is forgotten this much later."""


class Differences(NamedTuple):
    """By id. `changed` are members as they are now, under another epoch or with other addresses or facts."""

    joined: tuple[Member, ...] = ()
    left: tuple[Member, ...] = ()
    changed: tuple[Member, ...] = ()


class KnownMembers:
    """`linger_s` 0 believes the registry at its word."""

    def __init__(self, *, linger_s: float = LINGER_S) -> None:
        self._linger_s = linger_s
        self._members: dict[str, Member] = {}
        self._missing_since: dict[str, float] = {}  # of those in `_members` that the last answer lacked

    @property
    def members(self) -> Mapping[str, Member]:
        """By id."""
        return MappingProxyType(self._members)

    @property
    def due_at(self) -> float | None:
        """When `expire` has something to do; None = not before the next answer."""
        since = min(self._missing_since.values(), default=None)
        return None if since is None else since + self._linger_s

    def update(self, members: Iterable[Member], now: float) -> Differences:
        """What the registry's answer changes."""
        answer = {member.instance_id: member for member in members}
        joined = [member for id, member in answer.items() if id not in self._members]
        changed = [m for id, m in answer.items() if self._members.get(id, m) != m]
        self._missing_since = {id: self._missing_since.get(id, now) for id in self._members if id not in answer}
        self._members.update(answer)
        return Differences(_by_id(joined), self.expire(now).left, _by_id(changed))

    def expire(self, now: float) -> Differences:
        """Gives up those that have been missing for long enough."""
        over = [id for id, at in self._missing_since.items() if now - at >= self._linger_s]
        for instance_id in over:
            del self._missing_since[instance_id]
        return Differences(left=_by_id(self._members.pop(id) for id in over))

    def validate(self) -> None:
        """Raises AssertionError when the two views contradict each other."""
        assert self._missing_since.keys() <= self._members.keys(), "a stranger is missing"
        assert all(id == m.instance_id for id, m in self._members.items()), "filed under another id"


def _by_id(members: Iterable[Member]) -> tuple[Member, ...]:
    return tuple(sorted(members, key=lambda member: member.instance_id))
