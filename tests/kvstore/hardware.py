"""Simulates the memory and the disk of a node: they record which content lies where, in place of its bytes.

A content is a number that stands for the bytes of one object; it serves as their checksum too. A write overwrites the
earlier content of its space, so that every stale offset or place shows as wrong content.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from moonserve.kvstore.disk.base import DiskObject, Place
from moonserve.kvstore.state.allocator import ALIGNMENT, padded

NOTHING = 0


class Memory:
    """A memory segment with one content per unit of space."""

    def __init__(self, num_units: int) -> None:
        self._units = [NOTHING] * num_units

    @property
    def nbytes(self) -> int:
        return len(self._units) * ALIGNMENT

    def write(self, offset: int, length: int, content: int) -> None:
        units = self._range(offset, length)
        self._units[units] = [content] * (units.stop - units.start)

    def read(self, offset: int, length: int) -> int:
        """Returns the content of this range; `NOTHING` if the range holds more than one content."""
        found = set(self._units[self._range(offset, length)])
        return found.pop() if len(found) == 1 else NOTHING

    def _range(self, offset: int, length: int) -> slice:
        first = offset // ALIGNMENT
        return slice(first, first + padded(length) // ALIGNMENT)


@dataclass
class Disk:
    """A `kvstore.disk.base.DiskSpace` that records which objects survive a restart."""

    live_limit: int
    kept: dict[Place, DiskObject] = field(default_factory=dict)
    """Objects on the medium, released or not: a restart finds them."""
    live: set[Place] = field(default_factory=set)
    """Places that were allocated and not released."""
    num_given: int = 0

    def space(self, length: int) -> int:
        return padded(length) + ALIGNMENT

    def takes(self, length: int) -> bool:
        return self.space(length) <= self.live_limit

    def write(self, written: DiskObject) -> Place:
        self.num_given += 1
        place = Place(self.num_given)
        self.kept[place] = written
        self.live.add(place)
        return place

    def release(self, place: Place) -> None:
        self.live.remove(place)

    def forget(self, removed: Iterable[DiskObject]) -> None:
        """Deletes these objects and earlier ones of their keys."""
        last = {o.key: o.generation for o in removed}
        for place, o in list(self.kept.items()):
            if o.generation <= last.get(o.key, -1):
                del self.kept[place]

    def move(self, place: Place) -> Place:
        """Copies an object to a new place, as compaction does; `moved` then drops one of the two copies."""
        return self.write(self.kept[place])

    def moved(self, old: Place, new: Place, *, wanted: bool) -> None:
        dropped = old if wanted else new
        self.live.remove(dropped)
        self.kept.pop(dropped, None)

    def compact(self) -> None:
        """Reclaims released places."""
        self.kept = {place: o for place, o in self.kept.items() if place in self.live}

    def recover(self) -> list[tuple[DiskObject, Place]]:
        """Returns the objects that a restart finds; each place is live until it is released."""
        self.live = set(self.kept)
        return [(o, place) for place, o in self.kept.items()]
