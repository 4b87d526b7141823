"""What the books of a pool promise, whoever keeps them: `pages.c`, or `twin.py` where there is no compiler.

A request is a number below 2**64 of its owner's choice. It is there from when it gets a block, or the promise of one,
to when it is freed or evicted, and it is *busy* until it rests: only requests at rest and without a pin are evicted.
Requests of a priority above 0 are *high*: the others may hold all blocks but the share that is reserved for these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

Blocks = list[int]
BlockArray = npt.NDArray[np.uint32]
RequestArray = npt.NDArray[np.uint64]

MAX_REQUEST = 2**64 - 1
MAX_BLOCKS = 2**31 - 1
MAX_PRIORITY = 255
MAX_PINS = 2**16 - 1
MAX_USES = 2**24 - 1
"""Uses beyond it no longer tell requests apart (LFU)."""
LFU_SHIFT = 40
MILLION = 1_000_000


class Eviction(IntEnum):
    """Which request at rest goes first."""

    LRU = 0
    """The one that has rested longest."""
    LFU = 1
    """The one that was used least often (it came, or woke); of several the one that has rested longest."""
    FIFO = 2
    """The one that came first."""


class Mark(IntEnum):
    """What is noted of a request. `pages_mark` of pages.c."""

    REST = 0
    WAKE = 1
    PIN = 2
    UNPIN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """What a pool is made for. Raises ValueError for what cannot be."""

    num_blocks: int
    max_blocks: int | None = None
    """How far it can grow; None = not at all. Tables are made for so many."""
    max_requests: int | None = None
    """That hold blocks at once; None = as many as blocks."""
    high_share: float = 0.0
    """Of the blocks, which requests of priority 0 leave to those above."""
    eviction: Eviction | None = None
    """Whether requests at rest go when blocks are short, and which first; None = none goes."""
    wait_s: float = 0.0
    """How long an allocation waits for blocks unless it says so itself; 0 = it is refused at once."""
    max_waiting: int = 1024
    """Allocations that wait at once; more are refused."""
    prefault: bool = True
    """Whether all memory is taken at the beginning, so that nothing is slow for being touched first."""

    def __post_init__(self) -> None:
        for name, value, most in (
            ("max_blocks", self.block_limit, MAX_BLOCKS),
            ("num_blocks", self.num_blocks, self.block_limit),
            ("max_requests", self.request_limit, MAX_BLOCKS),
        ):
            if not 1 <= value <= most:
                raise ValueError(f"{name} must be from 1 to {most}, not {value}")
        if not 0.0 <= self.high_share <= 1.0:
            raise ValueError(f"high_share is a share from 0 to 1, not {self.high_share}")
        if self.wait_s < 0 or self.max_waiting < 0:
            raise ValueError("wait_s and max_waiting cannot be below 0")

    @property
    def block_limit(self) -> int:
        return self.num_blocks if self.max_blocks is None else self.max_blocks

    @property
    def request_limit(self) -> int:
        return self.block_limit if self.max_requests is None else self.max_requests

    @property
    def reserved_ppm(self) -> int:
        return round(self.high_share * MILLION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Of a pool at one moment; counters are since its beginning. `Stats` of pool.h, in its order."""

    end: int  # every block is below it
    retired: int  # of them, taken out of service
    free: int
    held: int  # by requests of priority 0
    held_high: int
    promised: int  # free blocks that only the requests may have to which they were promised
    promised_high: int
    requests: int
    runs: int  # of blocks side by side, over all requests
    evictable: int  # requests at rest and without a pin
    evictable_high: int
    evictable_blocks: int
    evictable_blocks_high: int
    allocations: int
    allocated: int  # blocks
    freed: int
    # Attempts for which there was not enough, also when eviction or waiting then helped.
    refusals: int
    evictions: int
    evicted_blocks: int
    in_place: int  # allocations whose blocks lie all behind what the request held
    metadata_bytes: int

    @property
    def num_blocks(self) -> int:
        """In service."""
        return self.end - self.retired

    @property
    def num_held(self) -> int:
        return self.held + self.held_high


@dataclass(frozen=True, slots=True)
class Wish:
    """Blocks that are asked for."""

    request: int
    count: int
    priority: int = 0  # of a request that is not there yet; the others have theirs
    room: int = 0  # blocks that will be wanted in all: a run is looked for that can grow so long
    existing: bool = False  # only for a request that is there
    ahead: bool = False  # does not queue behind those who wait


class PageCore(Protocol):
    """The books. Every call is atomic, but for `_all`, and may come from any thread. Numbers were checked."""

    def allocate(self, wish: Wish) -> Blocks | None:
        """At the end of what the request holds: beside it if possible, else side by side. None = not now; nothing has
        changed. Wakes the request. Raises LookupError when it must exist and does not."""

    def allocate_plain(self, request: int, count: int, priority: int) -> Blocks | None:
        """`allocate` without anything further, for where microseconds count."""

    def extend_plain(self, request: int, count: int) -> Blocks | None:
        """The same of a request that must exist."""

    def allocate_evicting(self, wish: Wish) -> tuple[Blocks | None, list[int]]:
        """As `allocate`; when there is not enough, requests at rest go, if that is enough: which."""

    def allocate_all(
        self, requests: RequestArray, counts: BlockArray, priority: int, room: int
    ) -> tuple[BlockArray, int]:
        """One after the other, until one cannot be had: the blocks of all, and how many requests got theirs. Raises
        ValueError when a count is 0."""

    def reserve(self, request: int, count: int, priority: int) -> bool:
        """So many blocks are promised to the request from now on. False = not now; nothing has changed."""

    def free(self, request: int) -> int:
        """How many blocks it held; 0 when it is not there."""

    def free_all(self, requests: RequestArray) -> int: ...

    def mark(self, request: int, mark: Mark) -> bool | None:
        """False: too many pins, or none. None: not there."""

    def hand_over(self, request: int, to: int, count: int) -> bool:
        """The first `count` blocks are those of `to` from now on, a new and busy request of the same priority. False =
        no more requests can come. Raises LookupError unless the one has so many blocks and the other is not there."""

    def blocks_of(self, request: int) -> BlockArray | None: ...

    def grow(self, count: int) -> int:
        """How many came into service: retired ones first, then at the end up to the limit."""

    def shrink(self, count: int) -> BlockArray:
        """What went out of service, the highest first."""

    def rank_of(self, request: int, priority: int) -> int:
        """How a request that asks stands among those who wait: priority · 2, and 1 for who is there already."""

    def set_barrier(self, barrier: int) -> None:
        """Wishes that rank below it, and are not `ahead`, are refused."""

    def stats(self) -> Stats: ...

    def latencies(self) -> npt.NDArray[np.uint64]:
        """Attempts to allocate by how long they took (`engine.pages.latency`)."""

    def validate(self) -> None:
        """Raises AssertionError unless every block is accounted for exactly once."""


RULES = (
    "the sets of free and retired blocks are sound",
    "every request can be found by its handle",
    "a request holds a block or a promise",
    "a held block is in one chain, neither free nor retired, and runs are counted",
    "requests at rest without a pin are in line, by rank, and no others",
    "sums over requests are what the books say",
    "free, retired and held blocks are all there are",
    "no more is promised than is free",
    "records are used or unused",
    "memory to check with can be had",
)
"""What `pages_check` of pages.c verifies; it answers with the number of the first that does not hold, from 1."""


_UINT64, _UINT32 = np.dtype(np.uint64), np.dtype(np.uint32)


def check_requests(requests: RequestArray) -> None:
    """Raises ValueError unless C can read them."""
    if requests.dtype != _UINT64 or requests.ndim != 1 or not requests.flags.c_contiguous:
        raise ValueError("requests of a batch are a contiguous array of uint64 in one dimension")


def one_wants_none() -> ValueError:
    return ValueError("every request of a batch wants a block: its count is 1 at least")


def counts_for(requests: RequestArray, counts: int | Sequence[int] | BlockArray) -> BlockArray:
    """One count per request, for C to read. Raises ValueError unless each is a number of blocks."""
    if isinstance(counts, np.ndarray) and counts.dtype == _UINT32:
        each = np.ascontiguousarray(counts)
    else:
        given = np.asarray(counts, np.int64)
        if given.size and not 0 <= given.min() <= given.max() <= MAX_BLOCKS:
            raise ValueError(f"counts of blocks are from 1 to {MAX_BLOCKS}")
        each = (
            np.full(requests.shape, given, np.uint32)
            if given.ndim == 0
            else given.astype(np.uint32)
        )
    if each.shape != requests.shape:
        raise ValueError("a batch wants one count for all requests, or one for each")
    return each


def wish_of(request: int, count: int, priority: int, room: int, *, existing: bool = False) -> Wish:
    """Raises ValueError for a number that is none of what it stands for: C would take it for another."""
    if not 0 <= request <= MAX_REQUEST:
        raise ValueError(f"{request} is not a request: a number below 2**64")
    if not 1 <= count <= MAX_BLOCKS or not 0 <= room <= MAX_BLOCKS:
        raise ValueError(f"{count} (room {room}) is not a number of blocks from 1 to {MAX_BLOCKS}")
    if not 0 <= priority <= MAX_PRIORITY:
        raise ValueError(f"a priority is from 0 to {MAX_PRIORITY}, not {priority}")
    return Wish(request, count, priority, room, existing)
