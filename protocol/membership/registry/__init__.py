"""Interface of the registry: the members of a cluster, each under a lease that it renews.

There are two implementations with one contract test: in Redis (`redis_registry`), and embedded in one of the cluster's
processes for clusters without a Redis. Membership is soft state. Losing the registry stops joins, not the data plane,
because readers keep what they last knew. `MemberView` is a process's local view of the members, built from the
registry's answers. Pure.
"""

import math
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

from moonserve.protocol.errors import InvalidRequest, StaleLease
from moonserve.protocol.request import Endpoint

TTL_S = 10.0
"""Lease time after which a silent member is gone; Mooncake's client TTL."""
RENEW_EVERY_S = 3.0
"""Interval of renewals: three tries within a TTL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Process in the registry. The registry assigns `endpoint.epoch`, which grows with every join under one id."""

    endpoint: Endpoint
    role: str  # "store", "directory", …
    owner: str  # token that may take the id over at once; processes that keep state keep it over restarts
    facts: Mapping[str, str] = field(default_factory=dict)  # for people and policies, e.g. capacity

    @property
    def instance_id(self) -> str:
        return self.endpoint.instance_id


class Superseded(StaleLease):
    """A later epoch holds the id. The process with the earlier epoch must end and not join again."""

    code = "superseded"


class Registry(Protocol):
    """Registry of the cluster's members.

    All methods raise PeerLost if the registry cannot be reached within their deadline, and Unauthenticated if it
    refuses the credentials."""

    async def join(self, member: Member, *, ttl_s: float = TTL_S) -> Member:
        """Takes the id and returns the member with its new epoch, which is above all earlier epochs of the id.

        The epoch in `member` is the last one that the member knows, or 0. The new epoch is also above it, even if the
        registry has lost its memory. Raises StaleLease if another owner holds the id: its message names the holder and
        the remaining time, which is also in `retry_after_s`. Raises InvalidRequest if the member is malformed.
        """

    async def renew(self, member: Member, *, ttl_s: float = TTL_S) -> None:
        """Renews the lease. Raises Superseded if a later epoch holds the id, StaleLease if the lease has ended."""

    async def leave(self, member: Member) -> None:
        """Ends the lease. No-op if it has ended or belongs to a later epoch."""

    async def members(self) -> list[Member]:
        """Returns the members whose lease has not ended, sorted by id."""

    def watch(self) -> AsyncIterator[list[Member]]:
        """Yields the members, now and after each change, without end. It waits while the registry cannot be reached or
        refuses credentials that it accepted before.

        Changes in quick succession may be merged. A registry that has lost its memory yields no members until they have
        joined again; `MemberView` bridges that time.
        """

    async def close(self) -> None: ...


MAX_ID_CHARS = 200
MAX_FACTS_CHARS = 16 * 1024
"""Limit of a member's facts, since every watcher receives all facts at each change."""
MAX_TTL_S = 24 * 3600.0
MAX_EPOCH = 2**62
"""Epochs start near the time in ns (2**61 is the year 2043) and are signed 64-bit numbers in Redis."""


def check_join(member: Member, ttl_s: float) -> None:
    """Raises InvalidRequest if a registry must not accept this member or lease time."""
    _check_name("instance id", member.instance_id)
    _check_name("owner", member.owner)
    _check_name("role", member.role)
    check_ttl(ttl_s)
    if not 0 <= member.endpoint.epoch < MAX_EPOCH:
        raise InvalidRequest(
            f"epoch {member.endpoint.epoch} is not in 0 … {MAX_EPOCH - 1}",
            instance_id=member.instance_id,
        )
    if sum(len(name) + len(value) for name, value in member.facts.items()) > MAX_FACTS_CHARS:
        raise InvalidRequest(f"the facts must not exceed {MAX_FACTS_CHARS} characters", instance_id=member.instance_id)


def check_ttl(ttl_s: float) -> None:
    # A NaN fails both comparisons.
    if not (0 < ttl_s <= MAX_TTL_S and math.isfinite(ttl_s)):
        raise InvalidRequest(f"the lease time of {ttl_s} s must be above 0 and at most {MAX_TTL_S:.0f} s")


def _check_name(what: str, name: str) -> None:
    if not name or len(name) > MAX_ID_CHARS or not name.isprintable():
        raise InvalidRequest(f"{what} {name[:MAX_ID_CHARS]!r} must be 1 to {MAX_ID_CHARS} printable characters")


LINGER_S = 2 * RENEW_EVERY_S
"""Time for one lost and one refused renewal. It delays the removal of a dead process by as much."""


class MembershipChanges(NamedTuple):
    """Changes of the membership, sorted by id. `changed` are the new states of members that were known before."""

    joined: tuple[Member, ...] = ()
    left: tuple[Member, ...] = ()
    changed: tuple[Member, ...] = ()


class MemberView:
    """Members that this process assumes to exist. Pure: `now` is an argument.

    An unreachable registry removes no member. A member that is missing from an answer is kept for another `linger_s`:
    after a registry restarts empty, members only join again when their next renewal is refused, and the data plane must
    not notice. With `linger_s` 0 the answer applies at once. It is not known whether a member responds."""

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

    def update(self, members: Iterable[Member], now: float) -> MembershipChanges:
        """Applies an answer of the registry and returns the changes."""
        answer = {member.instance_id: member for member in members}
        joined = [member for id, member in answer.items() if id not in self._members]
        changed = [m for id, m in answer.items() if self._members.get(id, m) != m]
        self._missing_since = {id: self._missing_since.get(id, now) for id in self._members if id not in answer}
        self._members.update(answer)
        return MembershipChanges(_by_id(joined), self.expire(now).left, _by_id(changed))

    def expire(self, now: float) -> MembershipChanges:
        """Removes the members that have been missing for `linger_s`, and returns the changes."""
        expired = [id for id, at in self._missing_since.items() if now - at >= self._linger_s]
        for instance_id in expired:
            del self._missing_since[instance_id]
        return MembershipChanges(left=_by_id(self._members.pop(id) for id in expired))

    def validate(self) -> None:
        """Raises AssertionError if the internal tables contradict each other."""
        assert self._missing_since.keys() <= self._members.keys(), "an unknown member is missing"
        assert all(id == m.instance_id for id, m in self._members.items()), "filed under another id"


def _by_id(members: Iterable[Member]) -> tuple[Member, ...]:
    return tuple(sorted(members, key=lambda member: member.instance_id))
