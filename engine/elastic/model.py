"""One model's part of an elastic pool: what an engine and its scheduler use. Thread-safe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine.elastic.actions import Grant
from engine.elastic.base import Range
from engine.elastic.paging import Paging
from engine.elastic.state import ElasticState
from protocol.ids import BlockId
from protocol.layout import KvLayout

T = TypeVar("T")


class Owner(Protocol):
    """What a model needs of its pool (`engine.elastic.pool`)."""

    def ask(self, question: Callable[[ElasticState], T]) -> T: ...
    def change(self, change: Callable[[ElasticState], None]) -> None: ...
    def settle(
        self,
        take: Callable[[ElasticState], Grant | None],
        is_coming: Callable[[ElasticState], bool],
    ) -> Grant | None: ...
    def wait_for(self, condition: Callable[[ElasticState], bool], timeout_s: float) -> bool: ...
    def limit(self, name: str, *, floor: int, ceiling: int) -> int: ...


class ElasticModel:
    """Blocks of one KV pool of `num_blocks` blocks over `address`, of which only those handed out are sure to be
    mapped. Made by `ElasticPool.add_model`."""

    def __init__(
        self, owner: Owner, name: str, layout: KvLayout, paging: Paging, memory: Range
    ) -> None:
        self.name = name
        self.layout = layout
        self.paging = paging
        self.address = memory.address
        self._owner = owner
        self._range = memory

    @property
    def num_blocks(self) -> int:
        """Of the range; ids are below it. Far more than can be held at once."""
        return self.paging.num_blocks

    @property
    def memory(self) -> memoryview:
        """For `KvPool`. Raises ConfigError where the memory is a device's."""
        return self._range.memory

    # -- blocks

    def allocate(self, count: int) -> list[BlockId] | None:
        """`count` blocks, mapped, their content undefined; or None and no change. Waits only for pages to be mapped,
        never for anybody to free something."""
        grant = self._owner.settle(
            lambda state: state.allocate(self.name, count),
            lambda state: state.available(self.name) >= count,
        )
        return None if grant is None else grant.blocks

    def free(self, blocks: Iterable[BlockId]) -> None:
        """Nothing may read or write them any more: their page may be another model's in a moment. Raises ValueError,
        and changes nothing, for a block that is not held."""
        self._owner.change(lambda state: state.free(self.name, blocks))

    def available(self) -> int:
        """Blocks that `allocate` would give now: physical capacity, for admission."""
        return self._owner.ask(lambda state: state.available(self.name))

    def most(self) -> int:
        """Blocks that could ever be held at once as floors and ceilings are; what needs more will never fit."""
        return self._owner.ask(lambda state: state.most(self.name))

    def wait_for(self, count: int, timeout_s: float) -> bool:
        """Whether `count` blocks became available in time."""
        return self._owner.wait_for(lambda state: state.available(self.name) >= count, timeout_s)

    # -- living beside others

    def limit(self, floor: int, ceiling: int) -> int:
        """New figures in bytes, from now on; returns the bytes held above the ceiling, which are given back as blocks
        are freed. Raises ConfigError."""
        return self._owner.limit(self.name, floor=floor, ceiling=ceiling)

    def want(self, count: int) -> None:
        """Says that requests wait for `count` blocks, until the next `allocate` that succeeds or `want(0)`: models
        that hold more get nothing new meanwhile."""
        self._owner.change(lambda state: state.want(self.name, count))

    def asked_back(self) -> int:
        """Blocks to free, if it can be done, since others wait: cached ones first, those of `emptiest` pages."""
        return self._owner.ask(lambda state: state.asked_back(self.name))

    def emptiest(self) -> list[range]:
        """Block ids of each page that has some in use, the page with the fewest first."""
        per_page = self.paging.blocks_per_page
        pages = self._owner.ask(lambda state: state.emptiest(self.name))
        return [range(page * per_page, (page + 1) * per_page) for page in pages]

    def pin(self, offset: int, nbytes: int) -> Pin | None:
        """Maps the pages that the range's bytes [offset, offset + nbytes) touch and keeps them so until the pin is
        closed: for memory that is registered with a transfer engine. Pages lie across all layers: pinning one layer's
        slab pins everything. None when there is no room. Raises ValueError for bytes beyond the range."""
        pages = tuple(self.paging.pages_at(offset, nbytes))
        grant = self._owner.settle(
            lambda state: state.pin(self.name, pages),
            lambda state: state.are_leaving(self.name, pages),
        )
        return None if grant is None else Pin(self._owner, self.name, pages)


@dataclass(slots=True, eq=False)
class Pin:
    """Pages that stay mapped until `close`."""

    _owner: Owner
    _name: str
    pages: tuple[int, ...]

    def close(self) -> None:
        """Any number of times."""
        pages, self.pages = self.pages, ()
        self._owner.change(lambda state: state.unpin(self._name, pages))

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
