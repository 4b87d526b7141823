"""An index of which instances hold which blocks, fed by the instances' own numbered events.

The instances are the truth; this is a hint about them that can be lost and rebuilt from their snapshots at any time.
It serves stores and workers' device caches alike and does no I/O.

A block's holders are the bits of one integer, so that a prefix match over all instances is one `&` per block. Parents
are not kept: a block key already commits to its whole chain. Dropping an instance only retires its bit; the entries
are swept together once the retired ones outweigh the rest, which keeps every operation O(1) per event on average.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protocol.ids import InstanceId
from protocol.keys import BlockKey

_SWEEP_AT_LEAST = 1024  # fewer dead entries are not worth a pass over the index
_MAX_RETIRED_BITS = 64  # more would widen every entry's integer for nothing


@dataclass(slots=True, eq=False)
class _Source:
    """One incarnation of an instance."""

    epoch: int
    bit: int  # 1 << n, not shared with any other incarnation until swept
    next_seq: int = 1  # number of the next event it has to send
    num_blocks: int = 0


class Directory:
    """Which instances hold which blocks."""

    def __init__(self) -> None:
        self._holders: dict[BlockKey, int] = {}
        self._sources: dict[InstanceId, _Source] = {}
        self._instance_of: dict[int, InstanceId] = {}  # by bit; live ones only
        self._live = 0  # union of the live bits
        self._retired = 0  # bits that may still be set in _holders but count no more
        self._num_retired_blocks = 0

    def apply(
        self,
        instance_id: InstanceId,
        epoch: int,
        added: Iterable[tuple[BlockKey, BlockKey]],
        removed: Iterable[BlockKey],
        first_seq: int,
        next_seq: int,
        snapshot: bool,
    ) -> bool:
        """Takes in the events [first_seq, next_seq) of one incarnation; `added` are (key, parent) pairs.

        No key occurs twice in one message, as `protocol.membership.BlockLog` makes them. Repeated and overlapping
        messages are harmless, those of an older epoch are ignored. False = events were missed and nothing was
        applied: ask for a snapshot.
        """
        known = self._sources.get(instance_id)
        if known is not None and epoch < known.epoch:
            return True
        source = known if known is not None and known.epoch == epoch else None
        expected = 1 if source is None else source.next_seq
        if not snapshot and first_seq > expected:
            return False
        if source is not None and next_seq < expected:
            return True
        if source is None or snapshot:
            source = self._renew(instance_id, epoch)
        self._add(source, added)
        self._remove(source, removed)
        source.next_seq = next_seq
        return True

    def drop(self, instance_id: InstanceId) -> None:
        """Forgets an instance; no-op when it is unknown."""
        source = self._sources.pop(instance_id, None)
        if source is None:
            return
        del self._instance_of[source.bit]
        self._live &= ~source.bit
        if source.num_blocks:
            self._retired |= source.bit
            self._num_retired_blocks += source.num_blocks
            self._sweep_if_due()

    def prefix_lengths(self, keys: Sequence[BlockKey]) -> dict[InstanceId, int]:
        """How many leading blocks of a chain each instance holds; instances without the first one are left out."""
        lengths: dict[InstanceId, int] = {}
        matching = self._live
        for index, key in enumerate(keys):
            holding = self._holders.get(key, 0) & matching
            if holding != matching:
                lengths.update(dict.fromkeys(self._instances(matching ^ holding), index))
                matching = holding
                if not matching:
                    break
        lengths.update(dict.fromkeys(self._instances(matching), len(keys)))
        return {instance_id: length for instance_id, length in lengths.items() if length}

    def holders(self, key: BlockKey) -> list[InstanceId]:
        """The instances that hold one block."""
        return list(self._instances(self._holders.get(key, 0) & self._live))

    def num_blocks(self, instance_id: InstanceId) -> int:
        """How many blocks an instance is known to hold; 0 when it is unknown."""
        source = self._sources.get(instance_id)
        return 0 if source is None else source.num_blocks

    def __len__(self) -> int:
        """Entries in memory, the ones that wait for a sweep included."""
        return len(self._holders)

    def validate(self) -> None:
        """Raises AssertionError unless counts and bits match the index."""
        counts = dict.fromkeys(self._instance_of, 0)
        for holders in self._holders.values():
            assert holders, "an entry of nobody"
            assert not holders & ~(self._live | self._retired), "a bit of nobody"
            for bit in _bits(holders & self._live):
                counts[bit] += 1
        assert self._live & self._retired == 0, "a bit is live and retired"
        assert {source.bit: source.num_blocks for source in self._sources.values()} == counts

    def _renew(self, instance_id: InstanceId, epoch: int) -> _Source:
        """A fresh, empty incarnation in place of what was known."""
        self.drop(instance_id)
        taken = self._live | self._retired
        source = _Source(epoch=epoch, bit=~taken & (taken + 1))  # the lowest bit that is free
        self._sources[instance_id] = source
        self._instance_of[source.bit] = instance_id
        self._live |= source.bit
        return source

    def _add(self, source: _Source, added: Iterable[tuple[BlockKey, BlockKey]]) -> None:
        for key, _ in added:
            holders = self._holders.get(key, 0)
            if not holders & source.bit:
                self._holders[key] = holders | source.bit
                source.num_blocks += 1

    def _remove(self, source: _Source, removed: Iterable[BlockKey]) -> None:
        for key in removed:
            holders = self._holders.get(key, 0)
            if not holders & source.bit:
                continue
            source.num_blocks -= 1
            if holders == source.bit:
                del self._holders[key]
            else:
                self._holders[key] = holders ^ source.bit

    def _sweep_if_due(self) -> None:
        if (
            self._num_retired_blocks > max(_SWEEP_AT_LEAST, len(self._holders) // 2)
            or self._retired.bit_count() > _MAX_RETIRED_BITS
        ):
            self._sweep()

    def _sweep(self) -> None:
        """Clears the retired bits everywhere; they may then be given out again."""
        live = self._live
        self._holders = {key: left for key, bits in self._holders.items() if (left := bits & live)}
        self._retired = 0
        self._num_retired_blocks = 0

    def _instances(self, bits: int) -> Iterable[InstanceId]:
        return (self._instance_of[bit] for bit in _bits(bits))


def _bits(mask: int) -> Iterable[int]:
    """The set bits of `mask`, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
