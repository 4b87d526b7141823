"""`PageCore` over the compiled library.

Its rule: a call that is over sooner than the interpreter's lock changes hands keeps that lock, and never waits: when
another thread is inside, it comes back at once and is made again without it. So no thread waits for the library while
it holds up the interpreter, and none needs the interpreter to get out of the library.
"""

from __future__ import annotations

import ctypes
import secrets
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.pages.base import (
    RULES,
    BlockArray,
    Blocks,
    Mark,
    PoolConfig,
    RequestArray,
    Stats,
    Wish,
    one_wants_none,
)
from engine.pages.latency import NUM_BUCKETS
from engine.pages.prototypes import NUM_STATS, EvictedState, PagesLibrary, Setting, WishState
from protocol.errors import ConfigError

_BUSY, _FULL, _UNKNOWN, _AGAIN, _WRONG = -1, -2, -3, -4, -5
_EXISTING, _AHEAD, _WAITS_NOT = 1, 2, 4
_EXTENDS = _EXISTING | _WAITS_NOT
_SCATTERED = 1 << 32
_BLOCK = _SCATTERED - 1
_SHORT = 4096  # blocks of a short call
_ROOM_FOR_EVICTED = 256  # told of by one call; more take another


class NativePages:
    """The books in C, in memory of their own that goes with this object."""

    def __init__(self, library: PagesLibrary, config: PoolConfig) -> None:
        setting = Setting(
            config.num_blocks,
            config.block_limit,
            config.request_limit,
            config.reserved_ppm,
            config.eviction or 0,
            secrets.randbits(64),  # handles may come from clients
            config.prefault,
        )
        at = library.create(ctypes.addressof(setting))
        if not at:
            raise ConfigError(
                f"no memory for the tables of {config.block_limit} blocks and {config.request_limit}"
                " requests: choose a lower max_blocks or max_requests"
            )
        self._library = library
        self._at = at
        self._most_at_once = config.block_limit
        self._this = ctypes.c_void_p(at)
        self._plain, self._try_free, self._try_mark = (
            library.try_allocate_plain,
            library.try_free,
            library.try_mark,
        )
        weakref.finalize(self, library.destroy, at).atexit = False  # threads may still be inside

    def allocate(self, wish: Wish) -> Blocks | None:
        state = _state_of(wish)
        if wish.count <= _SHORT:
            state.flags |= _WAITS_NOT
            answer = self._library.try_allocate(self._at, ctypes.addressof(state), None)
            if answer != _BUSY:
                return self._blocks(answer, wish.request, wish.count)
            state.flags &= ~_WAITS_NOT
        answer = self._library.allocate(self._at, ctypes.addressof(state), None)
        return self._blocks(answer, wish.request, wish.count)

    def allocate_plain(self, request: int, count: int, priority: int) -> Blocks | None:
        if count <= _SHORT:
            how = priority << 8 | _WAITS_NOT
            first = self._plain(self._this, request, request >> 32, count, how)
            if 0 <= first < _SCATTERED:
                return [first] if count == 1 else [*range(first, first + count)]
            if first != _BUSY:
                return self._blocks(first, request, count)
        return self.allocate(Wish(request, count, priority))

    def extend_plain(self, request: int, count: int) -> Blocks | None:
        if count <= _SHORT:
            first = self._plain(self._this, request, request >> 32, count, _EXTENDS)
            if 0 <= first < _SCATTERED:
                return [first] if count == 1 else [*range(first, first + count)]
            if first != _BUSY:
                return self._blocks(first, request, count)
        return self.allocate(Wish(request, count, existing=True))

    def allocate_evicting(self, wish: Wish) -> tuple[Blocks | None, list[int]]:
        state, evicted, answer = _state_of(wish), list[int](), _AGAIN
        while answer == _AGAIN:
            handles = np.empty(_ROOM_FOR_EVICTED, np.uint64)
            told = EvictedState(_address(handles), len(handles), 0)
            answer = self._library.allocate(
                self._at, ctypes.addressof(state), ctypes.addressof(told)
            )
            evicted += handles[: told.count].tolist()
        return self._blocks(answer, wish.request, wish.count), evicted

    def allocate_all(
        self, requests: RequestArray, counts: BlockArray, priority: int, room: int
    ) -> tuple[BlockArray, int]:
        num, counts_at = len(requests), _address(counts)
        total = self._library.total(counts_at, num)
        if total < 0:
            raise one_wants_none()
        blocks: BlockArray = np.empty(min(total, self._most_at_once), np.uint32)
        done = self._library.allocate_all(
            self._at, _address(requests), num, counts_at, priority, room, _address(blocks)
        )
        if done < num:
            blocks = blocks[: int(counts[:done].sum(dtype=np.int64))].copy()
        return blocks, done

    def reserve(self, request: int, count: int, priority: int) -> bool:
        state = WishState(request, count, priority, 0, 0)
        return self._library.reserve(self._at, ctypes.addressof(state)) > 0

    def free(self, request: int) -> int:
        count = self._try_free(self._this, request, request >> 32, _WAITS_NOT)
        if count == _BUSY:
            count = self._library.free(self._this, request, request >> 32, 0)
        return count if count > 0 else 0

    def free_all(self, requests: RequestArray) -> int:
        return self._library.free_all(self._at, _address(requests), len(requests))

    def mark(self, request: int, mark: Mark) -> bool | None:
        answer = self._try_mark(self._this, request, request >> 32, mark, _WAITS_NOT)
        if answer == _BUSY:
            answer = self._library.mark(self._this, request, request >> 32, mark, 0)
        return None if answer == _UNKNOWN else bool(answer)

    def hand_over(self, request: int, to: int, count: int) -> bool:
        answer = self._library.hand_over(self._at, request, to, count)
        if answer in (_UNKNOWN, _WRONG):
            raise LookupError(request)
        return answer > 0

    def blocks_of(self, request: int) -> BlockArray | None:
        blocks: BlockArray = np.empty(16, np.uint32)
        while True:
            count = self._library.table(self._at, request, _address(blocks), len(blocks))
            if count == _UNKNOWN:
                return None
            if count <= len(blocks):
                return blocks[:count]
            blocks = np.empty(count + count // 4, np.uint32)  # it may have grown since

    def grow(self, count: int) -> int:
        return self._library.grow(self._at, count)

    def shrink(self, count: int) -> BlockArray:
        count = min(count, self.stats().num_blocks)
        blocks: BlockArray = np.empty(count, np.uint32)
        return blocks[: self._library.shrink(self._at, count, _address(blocks))]

    def rank_of(self, request: int, priority: int) -> int:
        return self._library.rank(self._at, request, priority)

    def set_barrier(self, barrier: int) -> None:
        self._library.set_barrier(self._at, barrier)

    def stats(self) -> Stats:
        return Stats(**dict(zip(Stats.__slots__, self._read()[0].tolist(), strict=True)))

    def latencies(self) -> npt.NDArray[np.uint64]:
        return self._read()[1]

    def validate(self) -> None:
        broken = self._library.check(self._at)
        assert not broken, f"does not hold: {RULES[broken - 1]}"

    def _read(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        stats, latencies = np.empty(NUM_STATS, np.uint64), np.empty(NUM_BUCKETS, np.uint64)
        self._library.stats(self._at, _address(stats), _address(latencies))
        return stats, latencies

    def _blocks(self, answer: int, request: int, count: int) -> Blocks | None:
        if answer == _FULL:
            return None
        if answer == _UNKNOWN:
            raise LookupError(request)
        first = answer & _BLOCK
        if not answer & _SCATTERED:
            return list(range(first, first + count))
        blocks: BlockArray = np.empty(count, np.uint32)
        self._library.follow(self._at, first, count, _address(blocks))
        return list(map(int, blocks))


def _state_of(wish: Wish) -> WishState:
    flags = _EXISTING * wish.existing | _AHEAD * wish.ahead
    return WishState(wish.request, wish.count, wish.priority, wish.room, flags)


def _address(array: npt.NDArray[Any]) -> int:
    try:
        # A quarter of what follows. Arrays are buffers, which their type tells only from Python 3.12 on.
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read-only, or empty
        return int(array.__array_interface__["data"][0])
