"""The elastic pool: models that share one budget of physical memory. Thread-safe.

The shell around `engine.elastic.state`: one lock for deciding, none held while memory is mapped or unmapped. A call
that needs pages which are not mapped maps them itself; a background thread maps the reserve ahead and unmaps what is
given back, so that an ordinary allocation or free only decides. Every action is run once, by whoever was given it.

    pool = ElasticPool(8 << 30, CpuBacking())
    model = pool.add_model("chat", layout, floor=1 << 30)
    kv = KvPool(layout, model.num_blocks, model.memory)
    blocks = model.allocate(12)

`num_blocks` of a model is that of its addresses, enough for the whole budget; what can be had now is `available()`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.elastic.actions import Action, Grant, Map, Release, Reserve, Unmap
from engine.elastic.base import Backing, MappingFailed, Range
from engine.elastic.model import ElasticModel
from engine.elastic.paging import Paging
from engine.elastic.state import ElasticState
from protocol.errors import ConfigError
from protocol.layout import KvLayout

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStats:
    """One model, in bytes of physical memory but for `used_blocks`."""

    name: str
    floor_bytes: int
    ceiling_bytes: int
    held_bytes: int  # mapped, or about to be
    empty_bytes: int  # of those, without a block in use
    pending_bytes: int  # held above the ceiling, given back as blocks are freed
    wanted_bytes: int  # what the model waits for
    pinned_bytes: int
    used_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """The pool since its beginning."""

    budget_bytes: int
    free_bytes: int  # in no page
    pending_bytes: int  # not given back to the machine yet since the budget was lowered
    maps: int  # pages
    unmaps: int
    maps_awaited: int  # pages that a caller mapped since none was in reserve
    map_failures: int
    models: tuple[ModelStats, ...]


class ElasticPool:
    """`budget_bytes` of the backing's memory, at most `largest_bytes` later (`resize`). Close it when no model computes
    any more."""

    def __init__(
        self,
        budget_bytes: int,
        backing: Backing,
        *,
        largest_bytes: int = 0,
        reserve: Reserve | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError for a budget below one frame."""
        self._frame_bytes = backing.frame_bytes
        self._largest_bytes = max(budget_bytes, largest_bytes)
        num_frames = budget_bytes // self._frame_bytes
        if num_frames < 1:
            raise ConfigError(
                f"an elastic budget of {budget_bytes} bytes holds no frame of {self._frame_bytes}"
            )
        self._backing = backing
        self._state = ElasticState(num_frames, reserve or Reserve())
        self._clock = clock
        self._ranges: dict[str, Range] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # something was mapped, unmapped or freed
        self._due = threading.Condition(self._lock)  # there is work for the background thread
        self._maps = self._unmaps = self._maps_awaited = self._map_failures = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="elastic-pool", daemon=True)
        self._thread.start()

    def __enter__(self) -> ElasticPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the background thread and gives all memory back, whoever still holds blocks."""
        with self._lock:
            self._is_closing = True
            self._due.notify_all()
        self._thread.join()
        with self._lock:
            ranges, self._ranges = list(self._ranges.values()), {}
        for each in ranges:
            each.close()
        self._backing.close()

    def resize(self, budget_bytes: int) -> int:
        """Another budget from now on, since a neighbour on the device needs memory or has left some. Returns how much
        more than it is still in use: given back as blocks are freed (`ElasticModel.asked_back`), and nothing is mapped
        until then (`PoolStats.pending_bytes` says when). Raises ConfigError when the floors do not fit or for more than
        `largest_bytes`."""
        if budget_bytes > self._largest_bytes:
            raise ConfigError(
                f"{budget_bytes} bytes, where at most {self._largest_bytes} were planned"
            )
        with self._lock:
            try:
                actions = self._state.resize(budget_bytes // self._frame_bytes)
            except ValueError as error:
                raise ConfigError(f"a budget of {budget_bytes} bytes: {error}") from error
            self._wake()
        self._perform(actions)
        return self.ask(lambda state: state.frames.num_pending) * self._frame_bytes

    # -- models

    def add_model(
        self, name: str, layout: KvLayout, *, ceiling: int | None = None, floor: int = 0
    ) -> ElasticModel:
        """Addresses for a KV pool as large as the budget can ever be; nothing is mapped yet. `floor` bytes can always
        be had, `ceiling` (None: all) is never exceeded; both count whole pages. Raises ConfigError."""
        budget_bytes = self._state.budget.num_frames * self._frame_bytes
        paging = Paging.make(layout, self._frame_bytes, self._largest_bytes)
        if paging.page_bytes > budget_bytes:
            raise ConfigError(
                f"a page of {name!r} takes {paging.page_bytes} bytes, the budget is {budget_bytes}: "
                "use smaller frames, or a block size whose pieces are a power of two of bytes"
            )
        frames = self._in_frames(floor, self._largest_bytes if ceiling is None else ceiling)
        memory = self._backing.reserve(paging.range_bytes)
        with self._lock:
            try:
                self._state.add(name, paging, *frames)
            except ValueError as error:
                memory.close()
                raise ConfigError(f"model {name!r}: {error}") from error
            self._ranges[name] = memory
        return ElasticModel(self, name, layout, paging, memory)

    def remove_model(self, name: str) -> None:
        """Gives back all that the model has. Raises ConfigError while blocks or pins of it are held."""
        with self._lock:
            try:
                self._state.end(name)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            self._due.notify_all()
            self._changed.wait_for(lambda: not self._state.has_pages(name))
            self._state.remove(name)
            memory = self._ranges.pop(name)
        memory.close()

    def limit(self, name: str, *, floor: int, ceiling: int) -> int:
        """New figures in bytes, from now on. Returns how much the model holds above the ceiling: given back as its
        blocks are freed, and nothing is allocated until then. Raises ConfigError."""
        frames = self._in_frames(floor, ceiling)
        with self._lock:
            try:
                self._state.limit(name, *frames)
            except ValueError as error:
                raise ConfigError(f"model {name!r}: {error}") from error
            self._wake()
            return self._state.models()[name][1].excess * self._frame_bytes

    def _in_frames(self, floor: int, ceiling: int) -> tuple[int, int]:
        if not 0 <= floor <= ceiling:
            raise ConfigError(f"a floor of {floor} bytes and a ceiling of {ceiling}")
        lowest = -(-floor // self._frame_bytes)
        return lowest, max(ceiling // self._frame_bytes, lowest)

    def stats(self) -> PoolStats:
        with self._lock:
            models = tuple(self._model_stats(name) for name in self._state.models())
            return PoolStats(
                budget_bytes=self._state.budget.num_frames * self._frame_bytes,
                free_bytes=self._state.frames.num_free * self._frame_bytes,
                pending_bytes=self._state.frames.num_pending * self._frame_bytes,
                maps=self._maps,
                unmaps=self._unmaps,
                maps_awaited=self._maps_awaited,
                map_failures=self._map_failures,
                models=models,
            )

    def _model_stats(self, name: str) -> ModelStats:
        pages, share = self._state.models()[name]
        return ModelStats(
            name=name,
            floor_bytes=share.floor * self._frame_bytes,
            ceiling_bytes=share.ceiling * self._frame_bytes,
            held_bytes=share.held * self._frame_bytes,
            empty_bytes=share.empty * self._frame_bytes,
            pending_bytes=share.excess * self._frame_bytes,
            wanted_bytes=share.wanted * self._frame_bytes,
            pinned_bytes=pages.num_pinned * pages.paging.page_bytes,
            used_blocks=pages.num_used,
        )

    # -- what models ask for

    def ask(self, question: Callable[[ElasticState], T]) -> T:
        """Looks something up."""
        with self._lock:
            return question(self._state)

    def change(self, change: Callable[[ElasticState], None]) -> None:
        """Changes the state and lets the background thread and those who wait look at it."""
        with self._lock:
            change(self._state)
            self._wake()
            self._changed.notify_all()

    def settle(
        self,
        take: Callable[[ElasticState], Grant | None],
        is_coming: Callable[[ElasticState], bool],
    ) -> Grant | None:
        """Takes, and returns once all that was given is mapped. None when there is not enough and `is_coming` says that
        pages on their way out would not change it, or when the machine refused to map."""
        with self._lock:
            grant = take(self._state)
            while grant is None and is_coming(self._state):
                self._changed.wait()
                grant = take(self._state)
            self._wake()
            if grant is None or not (grant.outstanding or grant.actions):
                return grant
            self._maps_awaited += sum(isinstance(each, Map) for each in grant.actions)
        self._perform(grant.actions)
        with self._lock:
            self._changed.wait_for(lambda: not grant.outstanding)
        return None if grant.failed else grant

    def wait_for(self, condition: Callable[[ElasticState], bool], timeout_s: float) -> bool:
        """Whether the condition came to hold in time; looked at whenever something is freed, mapped or unmapped."""
        with self._lock:
            return self._changed.wait_for(lambda: condition(self._state), timeout_s)

    def validate(self) -> None:
        """Raises AssertionError unless everything is accounted for exactly once."""
        with self._lock:
            self._state.validate()

    # -- actions

    def _perform(self, actions: Sequence[Action]) -> None:
        pending = deque(actions)
        while pending:
            match pending.popleft():
                case Map() as mapping:
                    pending.extend(self._map(mapping))
                case Unmap() as unmapping:
                    pending.extend(self._unmap(unmapping))
                case Release() as release:
                    pending.extend(self._release(release))

    def _map(self, action: Map) -> list[Action]:
        memory, offsets, span_bytes = self._place(action)
        try:
            memory.map(offsets, span_bytes, action.frames)
        except MappingFailed as error:
            log.warning("model %s: a page could not be mapped: %s", action.model, error)
            with self._lock:
                self._map_failures += 1
                return self._told(self._state.not_mapped(action))
        with self._lock:
            self._maps += 1
            return self._told(self._state.mapped(action))

    def _unmap(self, action: Unmap) -> list[Action]:
        memory, offsets, span_bytes = self._place(action)
        memory.unmap(offsets, span_bytes, action.frames)
        with self._lock:
            self._unmaps += 1
            return self._told(self._state.unmapped(action))

    def _release(self, action: Release) -> list[Action]:
        self._backing.release(action.frames)
        with self._lock:
            return self._told(self._state.released(action))

    def _told(self, follow_up: list[Action]) -> list[Action]:
        """Something is different now: for those who wait, and perhaps for the background thread."""
        self._changed.notify_all()
        self._wake()
        return follow_up

    def _place(self, action: Map | Unmap) -> tuple[Range, list[int], int]:
        with self._lock:
            paging = self._state.models()[action.model][0].paging
            return self._ranges[action.model], paging.spans(action.page), paging.span_bytes

    # -- the background thread

    def _wake(self) -> None:
        if self._state.has_work():
            self._due.notify()

    def _work(self) -> None:
        while True:
            with self._lock:
                action = None if self._is_closing else self._state.next_action(self._clock())
                while action is None:
                    if self._is_closing:
                        return
                    self._due.wait(self._sleep_s())
                    action = self._state.next_action(self._clock())
            self._perform([action])

    def _sleep_s(self) -> float | None:
        wake_at = self._state.wake_at()
        return None if wake_at is None else max(0.0, wake_at - self._clock())
