"""Who is there: the members of a cluster, each under a lease that it renews.

Two implementations with one contract test: `redis` for clusters with a Redis server, embedded in one of the cluster's
processes for those without. Membership is soft state. Losing the registry stops joins, not the data plane: whoever
reads it keeps what it last knew.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from protocol.errors import InvalidRequest, StaleLease
from protocol.request import Endpoint

TTL_S = 10.0
"""Mooncake's client TTL: silence after which a member is gone."""
RENEW_EVERY_S = 3.0
"""Three tries within a TTL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process. `endpoint.epoch` is the registry's: it grows with every join under one id."""

    endpoint: Endpoint
    role: str  # "store", "directory", …
    owner: str  # who may take the id over at once: kept over restarts by whoever keeps state
    facts: Mapping[str, str] = field(default_factory=dict)  # for people and policies, e.g. capacity

    @property
    def instance_id(self) -> str:
        return self.endpoint.instance_id


class Superseded(StaleLease):
    """A later epoch holds the id: whoever has this one must end rather than join again."""

    code = "superseded"


class Registry(Protocol):
    """All methods raise PeerLost when the registry cannot be reached within their deadline, Unauthenticated when it
    refuses the credentials."""

    async def join(self, member: Member, *, ttl_s: float = TTL_S) -> Member:
        """Takes the id and gives the member with its epoch, above all that this id ever had.

        The epoch in `member` is the last one it knows of, or 0; the new one is above that too, also where the registry
        has forgotten everything. Raises StaleLease when another owner holds the id; its message names who and for how
        long yet, its `retry_after_s` says that for programs. Raises InvalidRequest for a malformed member.
        """

    async def renew(self, member: Member, *, ttl_s: float = TTL_S) -> None:
        """Raises Superseded when a later epoch holds the id, StaleLease when the lease has ended or was forgotten."""

    async def leave(self, member: Member) -> None:
        """No-op when the lease has ended or belongs to a later epoch."""

    async def members(self) -> list[Member]:
        """Those whose lease has not ended, by id."""

    def watch(self) -> AsyncIterator[list[Member]]:
        """The members now, then again after each change; for ever, waiting while the registry cannot be reached, or
        refuses credentials that it took before.

        Changes that follow each other closely may come as one. A registry that has lost its memory shows nobody until
        its members have joined again; `protocol.registry.known` bridges that.
        """

    async def close(self) -> None: ...


MAX_ID_CHARS = 200
MAX_FACTS_CHARS = 16 * 1024
"""Every watcher receives every member's facts at each change."""
MAX_TTL_S = 24 * 3600.0
MAX_EPOCH = 2**62
"""Epochs start near the time in ns (2**61 is the year 2043) and travel as signed 64-bit numbers in Redis."""


def check_join(member: Member, ttl_s: float) -> None:
    """Raises InvalidRequest for what no registry may keep."""
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
        raise InvalidRequest(f"facts of more than {MAX_FACTS_CHARS} characters", instance_id=member.instance_id)


def check_ttl(ttl_s: float) -> None:
    # A NaN fails both comparisons.
    if not (0 < ttl_s <= MAX_TTL_S and math.isfinite(ttl_s)):
        raise InvalidRequest(f"a lease of {ttl_s} s; it must be above 0 and at most {MAX_TTL_S:.0f}")


def _check_name(what: str, name: str) -> None:
    if not name or len(name) > MAX_ID_CHARS or not name.isprintable():
        raise InvalidRequest(f"{what} {name[:MAX_ID_CHARS]!r} must be 1 to {MAX_ID_CHARS} printable characters")
