"""What can happen to a decode worker that reads prompts itself, beyond `decode_worker.events`, and what it wants done.

Loads and puts have the prefill worker's own events and actions, which say the same here.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefill_worker.events import PrefixLoaded, PrefixLoadFailed, PutDone, PutFailed
from protocol.ids import BlockId
from protocol.request import PrefixSource, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A request whose prompt nobody has computed; `sources`: where leading blocks of it can be read."""

    request: Request
    sources: tuple[PrefixSource, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """Answer to SealBlocks: checksums, in the order of its blocks."""

    seal_id: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutEnded:
    """What became of a put to this store."""

    store_id: str
    outcome: PutDone | PutFailed


Event = Submitted | Sealed | PutEnded | PrefixLoaded | PrefixLoadFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class SealBlocks:
    """Say the checksums of these whole blocks, which nobody writes any more → Sealed."""

    seal_id: int
    blocks: tuple[BlockId, ...]
