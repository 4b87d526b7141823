"""`PageCore` in Python: the same answers as `pages.c`, slower and with more memory. One lock around every call."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from engine.block_runs import num_runs
from engine.pages.base import (
    LFU_SHIFT,
    MAX_PINS,
    MAX_USES,
    MILLION,
    BlockArray,
    Blocks,
    Eviction,
    Mark,
    PoolConfig,
    RequestArray,
    Stats,
    Wish,
    one_wants_none,
)
from engine.pages.latency import NUM_BUCKETS
from engine.pages.twin_blocks import Space
from engine.pages.twin_requests import Line, Record, Timed


class PythonPages:
    """The books in dicts and lists."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._space = Space(config.block_limit)
        self._space.give(0, config.num_blocks)
        self._end = config.num_blocks
        self._records: dict[int, Record] = {}
        self._lines = (Line(), Line())
        self._held, self._promised = [0, 0], [0, 0]
        self._clock = 0
        self._barrier = 0
        self._counters = dict.fromkeys(Stats.__slots__[-8:-1], 0)
        self._latencies = np.zeros(NUM_BUCKETS, np.uint64)

    # -- what the Protocol says

    def allocate(self, wish: Wish) -> Blocks | None:
        with self._timed():
            return self._fulfil(wish, None)

    def allocate_plain(self, request: int, count: int, priority: int) -> Blocks | None:
        return self.allocate(Wish(request, count, priority))

    def extend_plain(self, request: int, count: int) -> Blocks | None:
        return self.allocate(Wish(request, count, existing=True))

    def allocate_evicting(self, wish: Wish) -> tuple[Blocks | None, list[int]]:
        evicted: list[int] = []
        with self._timed():
            return self._fulfil(wish, evicted), evicted

    def allocate_all(
        self, requests: RequestArray, counts: BlockArray, priority: int, room: int
    ) -> tuple[BlockArray, int]:
        if not counts.all():
            raise one_wants_none()
        blocks: list[int] = []
        for done, (request, count) in enumerate(
            zip(requests.tolist(), counts.tolist(), strict=True)
        ):
            more = self.allocate(Wish(request, count, priority, room))
            if more is None:
                return np.array(blocks, np.uint32), done
            blocks += more
        return np.array(blocks, np.uint32), len(requests)

    def reserve(self, request: int, count: int, priority: int) -> bool:
        with self._lock:
            record = self._records.get(request)
            if record is None and not count:
                return True
            more = max(0, count - (record.promised if record else 0))
            wish = Wish(request, more, priority)
            if more and (self._must_queue(record, wish) or self._lacks_room(record, wish, more)):
                self._counters["refusals"] += 1
                return False
            record = record or self._enter(wish)
            self._promise(record, count)
            if not record.size:
                self._leave(record)
            return True

    def free(self, request: int) -> int:
        with self._lock:
            record = self._records.get(request)
            return 0 if record is None else self._leave(record)

    def free_all(self, requests: RequestArray) -> int:
        return sum(map(self.free, requests.tolist()))

    def mark(self, request: int, mark: Mark) -> bool | None:
        with self._lock:
            record = self._records.get(request)
            if record is None:
                return None
            if mark is Mark.REST:
                self._rest(record)
            elif mark is Mark.WAKE:
                self._wake(record)
            elif record.pins == (MAX_PINS if mark is Mark.PIN else 0):
                return False
            else:
                record.pins += 1 if mark is Mark.PIN else -1
                self._line_up(record)
            return True

    def hand_over(self, request: int, to: int, count: int) -> bool:
        with self._lock:
            record = self._records.get(request)
            if record is None or not 0 < count <= len(record.blocks) or to in self._records:
                raise LookupError(request)
            if self._is_full:
                self._counters["refusals"] += 1
                return False
            heir = self._enter(Wish(to, count, record.priority))
            heir.blocks, record.blocks = record.blocks[:count], record.blocks[count:]
            if not record.size:
                self._leave(record)
            return True

    def blocks_of(self, request: int) -> BlockArray | None:
        with self._lock:
            record = self._records.get(request)
            return None if record is None else np.array(record.blocks, np.uint32)

    def grow(self, count: int) -> int:
        with self._lock:
            left = count
            while left and (block := self._space.retired.first()) is not None:
                self._space.retired.remove(block)
                self._space.give(block, 1)
                left -= 1
            more = min(left, self._config.block_limit - self._end)
            self._space.give(self._end, more)
            self._end += more
            return count - left + more

    def shrink(self, count: int) -> BlockArray:
        with self._lock:
            gone: list[int] = []
            for _ in range(min(count, self._available(high=1))):
                block = self._space.free.last()
                assert block is not None, "what is available is not free"
                self._space.take(block, 1)
                self._space.retired.add(block)
                gone.append(block)
            while self._end and self._end - 1 in self._space.retired:
                self._end -= 1
                self._space.retired.remove(self._end)
            return np.array(gone, np.uint32)

    def rank_of(self, request: int, priority: int) -> int:
        with self._lock:
            return _rank(self._records.get(request), priority)

    def set_barrier(self, barrier: int) -> None:
        with self._lock:
            self._barrier = barrier

    def stats(self) -> Stats:
        with self._lock:
            evictable = [line.members.values() for line in self._lines]
            return Stats(
                end=self._end,
                retired=self._space.retired.count,
                free=self._space.free.count,
                held=self._held[0],
                held_high=self._held[1],
                promised=self._promised[0],
                promised_high=self._promised[1],
                requests=len(self._records),
                runs=sum(num_runs(record.blocks) for record in self._records.values()),
                evictable=len(evictable[0]),
                evictable_high=len(evictable[1]),
                evictable_blocks=sum(record.size for record in evictable[0]),
                evictable_blocks_high=sum(record.size for record in evictable[1]),
                metadata_bytes=0,  # Python objects: not known
                **self._counters,
            )

    def latencies(self) -> npt.NDArray[np.uint64]:
        with self._lock:
            return self._latencies.copy()

    # -- allocation

    def _timed(self) -> Timed:
        return Timed(self._lock, self._latencies)

    def _fulfil(self, wish: Wish, evicted: list[int] | None) -> Blocks | None:
        record = self._records.get(wish.request)
        if record is None and wish.existing:
            raise LookupError(wish.request)
        drawn = min(record.promised, wish.count) if record else 0
        need = wish.count - drawn
        if not self._may_take(record, wish, need, evicted):
            self._counters["refusals"] += 1
            return None
        if record is None:
            record = self._enter(wish)
        self._wake(record)
        self._promise(record, record.promised - drawn)
        self._counters["allocations"] += 1
        return self._extend(record, wish)

    def _may_take(
        self, record: Record | None, wish: Wish, need: int, evicted: list[int] | None
    ) -> bool:
        """Whether there is enough, possibly after others have gone."""
        if need and self._must_queue(record, wish):
            return False
        if not self._lacks_room(record, wish, need):
            return True
        high = _high(record, wish)
        going = [r for line in self._lines[: high + 1] for r in line.members.values()]
        going = [r for r in going if r is not record]
        if evicted is None or (record is None and self._is_full and not going):
            return False
        back = [sum(r.size for r in going if r.high == h) for h in (0, 1)]
        if self._available(high, *back) < need:
            return False
        self._make_room(record, wish, need, evicted)
        return True

    def _make_room(self, record: Record | None, wish: Wish, need: int, evicted: list[int]) -> None:
        if record is not None and record.evictable:  # who asks is not evicted for it
            self._lines[record.high].remove(record)
        while self._lacks_room(record, wish, need):
            line = self._lines[0] if self._lines[0].members else self._lines[1]
            victim = line.first()
            evicted.append(victim.handle)
            self._counters["evictions"] += 1
            self._counters["evicted_blocks"] += len(victim.blocks)
            self._leave(victim)

    def _must_queue(self, record: Record | None, wish: Wish) -> bool:
        return not wish.ahead and _rank(record, wish.priority) < self._barrier

    def _lacks_room(self, record: Record | None, wish: Wish, need: int) -> bool:
        if record is None and self._is_full:
            return True
        return self._available(_high(record, wish)) < need

    @property
    def _is_full(self) -> bool:
        return len(self._records) == self._config.request_limit

    def _available(self, high: int, normal_back: int = 0, high_back: int = 0) -> int:
        spare = self._space.free.count - sum(self._promised) + normal_back + high_back
        if high:
            return spare
        capacity = self._end - self._space.retired.count
        reserved = capacity * self._config.reserved_ppm // MILLION
        used = self._held[0] + self._promised[0] - normal_back
        return min(spare, max(0, capacity - reserved - used))

    def _extend(self, record: Record, wish: Wish) -> Blocks:
        free, taken, left = self._space.free, list[int](), wish.count
        place = record.blocks[-1] + 1 if record.blocks else self._config.block_limit
        length = free.run(place, left)
        self._counters["in_place"] += length == wish.count
        while left:
            if not length:
                place = self._space.find(max(left, wish.room))
                length = free.run(place, left)
            self._space.take(place, length)
            taken += range(place, place + length)
            left -= length
            length = 0
        record.blocks += taken
        self._held[record.high] += wish.count
        self._counters["allocated"] += wish.count
        return taken

    # -- what happens to a record

    def _enter(self, wish: Wish) -> Record:
        record = self._records[wish.request] = Record(wish.request, wish.priority)
        if self._config.eviction is Eviction.FIFO:
            record.rank = self._tick()
        return record

    def _promise(self, record: Record, count: int) -> None:
        self._promised[record.high] += count - record.promised
        record.promised = count

    def _leave(self, record: Record) -> int:
        self._lines[record.high].remove(record)
        self._promise(record, 0)
        self._held[record.high] -= len(record.blocks)
        for block in record.blocks:
            self._space.give(block, 1)
        self._counters["freed"] += len(record.blocks)
        del self._records[record.handle]
        return len(record.blocks)

    def _rest(self, record: Record) -> None:
        if record.idle:
            return
        now = self._tick()
        if self._config.eviction in (Eviction.LRU, None):
            record.rank = now
        elif self._config.eviction is Eviction.LFU:
            record.rank = record.uses << LFU_SHIFT | now
        record.idle = True
        self._line_up(record)

    def _wake(self, record: Record) -> None:
        if record.idle:
            record.idle = False
            record.uses = min(record.uses + 1, MAX_USES)
            self._line_up(record)

    def _line_up(self, record: Record) -> None:
        line = self._lines[record.high]
        if record.evictable and record.handle not in line.members:
            line.add(record)
        elif not record.evictable:
            line.remove(record)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    # -- proof

    def validate(self) -> None:
        with self._lock:
            self._space.validate(self._end)
            chained = [block for record in self._records.values() for block in record.blocks]
            assert len(set(chained)) == len(chained), "a block is held twice"
            for block in chained:
                assert block not in self._space.free, "a held block is free"
                assert block not in self._space.retired, "a held block is retired"
                assert block < self._end, "a held block lies beyond the end"
            out_of_use = self._space.free.count + self._space.retired.count
            assert out_of_use + len(chained) == self._end, "a block is lost"
            assert sum(self._promised) <= self._space.free.count, "more is promised than is free"
            for high in (0, 1):
                self._validate_class(high)

    def _validate_class(self, high: int) -> None:
        records = [record for record in self._records.values() if record.high == high]
        assert self._held[high] == sum(len(r.blocks) for r in records), "held blocks drifted"
        assert self._promised[high] == sum(r.promised for r in records), "promises drifted"
        assert all(record.size for record in records), "a request has nothing"
        evictable = {record.handle for record in records if record.evictable}
        assert evictable == set(self._lines[high].members), "the line to be evicted drifted"


def _rank(record: Record | None, priority: int) -> int:
    return priority * 2 if record is None else record.priority * 2 + 1


def _high(record: Record | None, wish: Wish) -> int:
    return int(wish.priority > 0) if record is None else record.high
