"""In which order, and to where, the objects of a node that is drained go. Pure.

Rules: what is in memory goes first, since reading the rest from disk may evict it there; then parents before children,
which is how memory keeps them, too; a chain goes where the blocks before it are, else to its home as clients compute it
(`kvstore.client.placement`), so that they find it at once; calls are bounded in objects and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from protocol.keys import BlockKey

MAX_KEYS = 64
MAX_BYTES = 64 * 2**20
"""One call's worth: a fraction of a second to copy. A larger object goes alone."""


@dataclass(frozen=True, slots=True)
class Resident:
    """An object of the leaving node. `pin` is a StorePin."""

    key: BlockKey
    parent: BlockKey | None
    length: int
    pin: int = 0
    in_memory: bool = True


@dataclass(frozen=True, slots=True)
class Batch:
    """Objects for one call to one node, in order."""

    target: str
    objects: tuple[Resident, ...]

    @property
    def num_bytes(self) -> int:
        return sum(item.length for item in self.objects)


def waves(objects: Mapping[BlockKey, Resident]) -> Iterator[dict[BlockKey, Resident]]:
    """What is to be copied before what."""
    for in_memory in (True, False):
        wave = {key: item for key, item in objects.items() if item.in_memory is in_memory}
        if wave:
            yield wave


def first_of_chain(objects: Mapping[BlockKey, Resident], item: Resident) -> Resident:
    """The first of `objects` that leads to `item`."""
    seen: set[BlockKey] = set()
    while item.parent is not None and item.parent in objects and item.key not in seen:
        seen.add(item.key)
        item = objects[item.parent]
    return item


def in_order(objects: Mapping[BlockKey, Resident]) -> Iterator[list[Resident]]:
    """Trees of chains, each with its parents first; a tree's first block follows none of `objects`."""
    children: dict[BlockKey, list[BlockKey]] = {}
    tops: list[BlockKey] = []
    for item in objects.values():
        if item.parent in objects:
            assert item.parent is not None
            children.setdefault(item.parent, []).append(item.key)
        else:
            tops.append(item.key)
    for top in sorted(tops):
        yield _tree(objects, children, top)


def _tree(
    objects: Mapping[BlockKey, Resident],
    children: Mapping[BlockKey, Sequence[BlockKey]],
    top: BlockKey,
) -> list[Resident]:
    found: list[Resident] = []
    waiting = [top]
    while waiting:
        key = waiting.pop()
        found.append(objects[key])
        waiting += sorted(children.get(key, ()), reverse=True)
    return found


def batches(
    trees: Iterator[list[Resident]], target_of: Callable[[Resident], str]
) -> dict[str, list[Batch]]:
    """By target, in the order in which they are to be copied. `target_of` is asked about the first of each tree."""
    by_target: dict[str, list[Resident]] = {}
    for tree in trees:
        by_target.setdefault(target_of(tree[0]), []).extend(tree)
    return {target: list(_cut(target, objects)) for target, objects in by_target.items()}


def _cut(target: str, objects: Sequence[Resident]) -> Iterator[Batch]:
    part: list[Resident] = []
    num_bytes = 0
    for item in objects:
        if part and (len(part) == MAX_KEYS or num_bytes + item.length > MAX_BYTES):
            yield Batch(target, tuple(part))
            part, num_bytes = [], 0
        part.append(item)
        num_bytes += item.length
    if part:
        yield Batch(target, tuple(part))
