"""Who is there: the members of a cluster, each under a lease that it renews.

Two implementations with one contract test: `redis` for clusters with a Redis server, embedded in one of the cluster's
processes for those without. Membership is soft state. Losing the registry stops joins, not the data plane: whoever
reads it keeps what it last knew.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from protocol.errors import StaleLease
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
