"""Local view of the cluster's members, built from the registry's answers. Pure: `now` is an argument.

An unreachable registry removes no member. A member that is missing from an answer is kept for another `linger_s`: after
a registry restarts empty, members only join again when their next renewal is refused, and the data plane must not
notice. The module does not know whether a member responds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from protocol.registry.base import RENEW_EVERY_S, Member

LINGER_S = 2 * RENEW_EVERY_S
"""Time for one lost and one refused renewal. It delays the removal of a dead process by as much."""


class Differences(NamedTuple):
    """Changes of the membership, sorted by id. `changed` are the new states of members that were known before."""

    joined: tuple[Member, ...] = ()
    left: tuple[Member, ...] = ()
    changed: tuple[Member, ...] = ()


class KnownMembers:
    """Members that this process assumes to exist. With `linger_s` 0 the registry's answer applies at once."""

    def __init__(self, *, linger_s: float = LINGER_S) -> None:
        self._linger_s = linger_s
        self._members: dict[str, Member] = {}
        self._missing_since: dict[str, float] = {}  # members that are missing from the last answer

    @property
    def members(self) -> Mapping[str, Member]:
        """Members by id."""
        return MappingProxyType(self._members)

    @property
    def due_at(self) -> float | None:
        """Time at which `expire` removes the next member; None = not before the next answer."""
        since = min(self._missing_since.values(), default=None)
        return None if since is None else since + self._linger_s

    def update(self, members: Iterable[Member], now: float) -> Differences:
        """Applies an answer of the registry and returns the changes."""
        answer = {member.instance_id: member for member in members}
        joined = [member for id, member in answer.items() if id not in self._members]
        changed = [m for id, m in answer.items() if self._members.get(id, m) != m]
        self._missing_since = {id: self._missing_since.get(id, now) for id in self._members if id not in answer}
        self._members.update(answer)
        return Differences(_by_id(joined), self.expire(now).left, _by_id(changed))

    def expire(self, now: float) -> Differences:
        """Removes the members that have been missing for `linger_s`, and returns the changes."""
        over = [id for id, at in self._missing_since.items() if now - at >= self._linger_s]
        for instance_id in over:
            del self._missing_since[instance_id]
        return Differences(left=_by_id(self._members.pop(id) for id in over))

    def validate(self) -> None:
        """Raises AssertionError if the internal tables contradict each other."""
        assert self._missing_since.keys() <= self._members.keys(), "a stranger is missing"
        assert all(id == m.instance_id for id, m in self._members.items()), "filed under another id"


def _by_id(members: Iterable[Member]) -> tuple[Member, ...]:
    return tuple(sorted(members, key=lambda member: member.instance_id))
