"""The workers' side of the store: leases, one-sided reads and writes, verification; and a plain key-value interface.

Rules: every operation is bounded by its deadline; bytes that do not match their checksum never count as read; a
failed or cancelled operation leaves no lease and no reservation behind, and returns only when no transfer touches the
caller's memory any more. It does not know what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2
from protocol.request import Endpoint
from protocol.rpc import Channels
from transfer import RemoteSegment, Segment, TransferEngine

Pieces = Sequence[tuple[int, int]]
"""(local_offset, length) of the parts of one object, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedObject:
    """One object as it lies in the node's segment."""

    key: BlockKey
    offset: int
    length: int
    checksum: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLease:
    """The right to read the leading objects of a list of keys until it expires or is released."""

    lease_id: str
    store: Endpoint
    segment: RemoteSegment
    objects: tuple[LeasedObject, ...]  # of the leading keys that are present
    expires_at: float  # event loop's clock; not later than the node thinks


@dataclass(frozen=True, slots=True, kw_only=True)
class PutObject:
    """An object to store: where its pieces lie in local memory, and its checksum as made by its writer."""

    key: BlockKey
    parent: BlockKey | None  # None = its chain starts here
    checksum: int
    pieces: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutResult:
    """What became of each object of a put."""

    stored: int
    present: int  # it was there already, or another writer is storing it
    refused: int  # no space that could be had
    corrupt: tuple[BlockKey, ...]  # arrived with another checksum and were dropped


class StoreClient:
    """Reads from and writes to any store node."""

    def __init__(self, channels: Channels, transfer: TransferEngine) -> None: ...

    async def lease(
        self,
        store: Endpoint,
        keys: Sequence[BlockKey],
        *,
        ttl_s: float = 10.0,
        timeout_s: float = 2.0,
    ) -> ReadLease:
        """Leases the longest run of leading keys that the node holds; maybe none."""
        raise NotImplementedError

    async def read(
        self,
        lease: ReadLease,
        local: Segment,
        places: Sequence[Pieces],
        *,
        deadline_s: float,
    ) -> int:
        """Reads object i into the pieces `places[i]`; gives the number of leading objects that are good."""
        raise NotImplementedError

    async def release(self, lease: ReadLease) -> None:
        """Gives a lease back; no-op when it has expired or the node is gone."""
        raise NotImplementedError

    async def put(
        self,
        store: Endpoint,
        objects: Sequence[PutObject],
        local: Segment,
        *,
        deadline_s: float = 10.0,
    ) -> PutResult:
        """Stores objects from local memory; they are visible when this returns."""
        raise NotImplementedError

    async def exists(
        self, store: Endpoint, keys: Sequence[BlockKey], *, timeout_s: float = 2.0
    ) -> list[bool]:
        raise NotImplementedError

    async def remove(
        self,
        store: Endpoint,
        keys: Sequence[BlockKey],
        *,
        corrupt: bool = False,
        timeout_s: float = 2.0,
    ) -> int:
        """Removes objects; gives how many were there."""
        raise NotImplementedError

    async def stats(
        self, store: Endpoint, *, timeout_s: float = 2.0
    ) -> kvstore_pb2.StoreStatsReply:
        raise NotImplementedError

    async def get(self, store: Endpoint, key: bytes, *, deadline_s: float = 10.0) -> bytes | None:
        """The value of a plain key; None when there is none."""
        raise NotImplementedError

    async def put_bytes(
        self, store: Endpoint, key: bytes, value: bytes, *, deadline_s: float = 10.0
    ) -> None:
        """Stores a value under a plain key."""
        raise NotImplementedError
